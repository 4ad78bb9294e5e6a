"""The modes of modules, training and evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch all modules of a model to evaluation inside the block; afterwards each has its own mode again."""
    # setting an attribute of a module takes longer than a token does, so only those change that must
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
