"""States and summaries are nested tuples of tensors, each with the batch in front."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

_State = TypeVar("_State")


def map_state(function: Callable[[Any], Any], state: Any, *, leaf: type = Tensor) -> Any:
    """Apply `function` to every tensor of a `state`: nested tuples of tensors, each with the batch in front.

    With a kind of state as `leaf`, apply it to the instances of that kind instead; other tensors stay."""
    if isinstance(state, leaf):
        return function(state)
    if isinstance(state, tuple):
        parts = [map_state(function, part, leaf=leaf) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def batch_size(state: Any) -> int | None:
    """Return the batch size of the first tensor, None if there is no tensor."""
    if isinstance(state, Tensor):
        return state.shape[0] if state.ndim else None
    for part in state if isinstance(state, tuple) else ():
        if (size := batch_size(part)) is not None:
            return size
    return None


def for_batch(state: _State, batch: int) -> _State:
    """Return the state for `batch` sequences; that of one sequence is expanded, without a copy."""
    made = batch_size(state)
    if made in (batch, None):
        return state
    if made != 1:
        raise ValueError(f"the state is of {made} sequences, but there are {batch}")
    return map_state(lambda x: x.expand(batch, *x.shape[1:]), state)
