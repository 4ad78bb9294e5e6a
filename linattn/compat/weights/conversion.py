"""Conversions of other packages' weights into a model of ours: where each tensor comes from, and what becomes of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from linattn.compat.weights.changes import SAME, Change


class Move(NamedTuple):
    """The tensor `ours` is `change.apply(theirs)`; if `theirs` is None, it is a constant, made from its own shape."""

    ours: str
    theirs: str | None
    change: Change = SAME


Moves = Iterator[Move]


class Conversion(NamedTuple):
    """The weights of one constructor.

    `moves` takes our model, and whether rotary angles of performer-pytorch's local heads were aligned. Their names
    begin with one of `roots`. `arguments` takes a constructor and the original's arguments, and returns ours; `adapt`
    changes our model to one that its constructor does not make. Of theirs, names that match `left_out` are no weights;
    of ours, those that match `new` have no counterpart there. `differences` yields a warning for each output that is
    not the original's."""

    moves: Callable[[Any, bool], Iterable[Move]]
    roots: tuple[str, ...]
    arguments: Callable[[type, Mapping[str, Any]], Mapping[str, Any]] = lambda constructor, config: config
    adapt: Callable[[Any], None] = lambda model: None
    left_out: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    differences: Callable[[Any], Iterable[str]] = lambda model: ()


def parameters(ours: str, theirs: str, module: nn.Module | None, change: Change = SAME) -> Moves:
    """Move all parameters of a module, if there is one. Their names there are the same."""
    for name, _ in () if module is None else module.named_parameters():
        yield Move(f"{ours}.{name}", f"{theirs}.{name}", change)


def within(ours: str, theirs: str, moves: Iterable[Move]) -> Moves:
    """Put moves of a module's own names under the names that the module has in both models."""
    for move in moves:
        yield move._replace(ours=_join(ours, move.ours), theirs=move.theirs and _join(theirs, move.theirs))


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
