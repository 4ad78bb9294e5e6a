"""The modes of modules, training and evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch all modules of a model to evaluation inside the block; afterwards each has its own mode again."""
    # setting an attribute of all modules takes longer than a token does, so only those change that must
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, mode in modes:
            if mode:
                module.training = False
        yield
    finally:
        for module, mode in modes:
            if module.training is not mode:
                module.training = mode
