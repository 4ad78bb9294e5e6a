"""What there is to know of a constructor whose old weights can be loaded."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from linattn.compat.weights.moves import Move


def _none(model: nn.Module) -> Iterable[str]:
    return ()


class Recipe(NamedTuple):
    """`build` takes the original's arguments. `moves` takes our model, and whether rotary angles of performer-pytorch's
    local heads were aligned. Their names begin with one of `roots`. Of theirs, names that match `left_out` are no
    weights; of ours, those that match `new` have no counterpart there. `differences` says what comes out otherwise."""

    build: Callable[[Mapping[str, Any]], nn.Module]
    moves: Callable[[Any, bool], Iterable[Move]]
    roots: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    differences: Callable[[Any], Iterable[str]] = _none
