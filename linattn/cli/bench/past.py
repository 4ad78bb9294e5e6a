"""The state at a position, without the time that softmax would need to get there."""

from collections.abc import Callable
from typing import Any

from linattn.ops.softmax import SoftmaxState


def past_of(extend: Callable[[int, Any], Any], n: int, window: int) -> Any:
    """Reads as many tokens as fill every window, and then makes the caches of softmax as long as they would be: no
    other state depends on how many tokens there were."""
    return lengthened(extend(max(1, min(n, 2 * window)), None), n)


def lengthened(state: Any, n: int) -> Any:
    if isinstance(state, SoftmaxState):
        # whose keys these are does not matter to the time of a token
        return SoftmaxState(*(x[..., :1, :].repeat(1, 1, n, 1) for x in (state.k, state.v)))
    if isinstance(state, tuple):
        parts = [lengthened(part, n) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state
