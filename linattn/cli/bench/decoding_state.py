"""The state at a position, without the time that softmax would need to get there, and its size."""

from collections.abc import Callable
from typing import Any

from linattn.attention.states import map_state
from linattn.ops.softmax import SoftmaxState


def state_at(extend: Callable[[int, Any], Any], n: int, window: int) -> Any:
    """Read enough tokens to fill every window, then lengthen the caches of softmax: no other state depends on n."""
    return lengthened(extend(max(1, min(n, 2 * window)), None), n)


def lengthened(state: Any, n: int) -> Any:
    """Give every softmax cache n keys. Which keys they are does not change the time of a token."""

    def repeat(cache: SoftmaxState) -> SoftmaxState:
        return SoftmaxState(*(x[..., :1, :].repeat(1, 1, n, 1) for x in (cache.k, cache.v)))

    return map_state(repeat, state, leaf=SoftmaxState)


def num_bytes(state: Any) -> int:
    sizes: list[int] = []
    map_state(lambda tensor: sizes.append(tensor.nbytes), state)
    return sum(sizes)
