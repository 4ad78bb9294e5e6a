"""States of any layer: nested tuples of tensors, each tensor with the batch in front."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

_State = TypeVar("_State")


def checked_kind(state: Any, kind: type[_State]) -> _State:
    """Return the state. Raise ValueError unless its class is `kind`: other layers return other classes."""
    if not isinstance(state, kind):
        raise ValueError(
            f"the state must be a {kind.__name__}, as this layer returns it, but is a {type(state).__name__}"
        )
    return state


def checked_parts(state: Any, count: int) -> tuple[Any, ...]:
    """Return the state, or `count` Nones for None. Raise ValueError unless it is a plain tuple of `count` parts."""
    if state is None:
        return (None,) * count
    if type(state) is not tuple or len(state) != count:
        came = f"a tuple of {len(state)}" if type(state) is tuple else f"a {type(state).__name__}"
        raise ValueError(f"the state must be a tuple of {count}, one for each part, but is {came}")
    return state


def check_part(name: str, x: Any, dtype: torch.dtype | None, *sizes: int) -> None:
    """Raise ValueError unless x, part `name` of a state, is (b, *sizes) of `dtype`, or None where `dtype` is None."""
    actual = None if not isinstance(x, Tensor) else x.dtype
    if x is not None if dtype is None else (actual != dtype or x.shape[1:] != sizes):
        came = type(x).__name__ if actual is None else f"{tuple(x.shape)} of {actual}"
        expected = "None" if dtype is None else f"({', '.join(map(str, ('b', *sizes)))}) of {dtype}"
        raise ValueError(
            f"the state's {name} must be {expected} for this layer and these inputs, but is {came}: "
            "it was made with other options or from other inputs"
        )


def check_tokens(past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, length: int) -> None:
    """Raise ValueError unless a state's past_k and past_v have `length` tokens, with heads and channels as k and v."""
    for name, past, new in (("k", past_k, k), ("v", past_v, v)):
        check_part(name, past, new.dtype, new.shape[1], length, new.shape[3])


def map_state(function: Callable[[Any], Any], state: Any, *, leaf: type = Tensor) -> Any:
    """Apply `function` to every tensor of a `state`: nested tuples of tensors, each with the batch in front.

    With a kind of state as `leaf`, apply it to the instances of that kind instead; other tensors stay."""
    if not callable(function):
        raise ValueError(f"function must be a function, but is {function!r}")
    if isinstance(state, leaf):
        return function(state)
    if isinstance(state, tuple):
        parts = [map_state(function, part, leaf=leaf) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def tensors_in(state: Any) -> list[Tensor]:
    """Return the tensors of a state, in order."""
    tensors: list[Tensor] = []
    map_state(tensors.append, state)
    return tensors


def with_tensors(state: Any, tensors: Iterable[Tensor]) -> Any:
    """Return the `state` with its tensors replaced, in order."""
    following = iter(tensors)
    return map_state(lambda _: next(following), state)


def first_tensor(state: Any) -> Tensor | None:
    """Return the first tensor with dimensions, of which the first is the batch; None if there is none."""
    if isinstance(state, Tensor):
        return state if state.ndim else None
    for part in state if isinstance(state, tuple) else ():
        if (tensor := first_tensor(part)) is not None:
            return tensor
    return None


def batch_size(state: Any) -> int | None:
    """Return the batch size of the first tensor, None if there is no tensor."""
    tensor = first_tensor(state)
    return None if tensor is None else tensor.shape[0]


def for_batch(state: _State, batch: int) -> _State:
    """Return the state for `batch` sequences; that of one sequence is expanded, without a copy."""
    size = batch_size(state)
    if size in (batch, None):
        return state
    if size != 1:
        raise ValueError(f"the state is of {size} sequences, but there are {batch}")
    return map_state(lambda x: x.expand(batch, *x.shape[1:]), state)
