"""The modes of modules, training and evaluation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Modes = Sequence[tuple[Any, bool]]


def modes_of(*models: Any) -> Modes:
    """Return all modules of the models, each with whether it is in training."""
    return [(module, module.training) for model in models for module in model.modules()]


@contextmanager
def mode_switch(modes: Modes) -> Iterator[None]:
    """Switch modules to these modes inside the block; afterwards each has its own mode again."""
    own = [(module, module.training) for module, _ in modes]
    try:
        _switch(modes)
        yield
    finally:
        _switch(own)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch all modules of a model to evaluation inside the block; afterwards each has its own mode again."""
    with mode_switch([(module, False) for module in model.modules()]):
        yield


def _switch(modes: Modes) -> None:
    # setting an attribute of all modules takes longer than a token does, so only those change that must
    for module, mode in modes:
        if module.training is not mode:
            module.training = mode
