"""States in fewer bytes, for those that wait: in a cache, in a file, of a conversation that pauses."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from linattn.states.holders import map_state

COMPACT = (torch.bfloat16, torch.float16, torch.int8)
_SCALE = torch.float32


class Compressed(NamedTuple):
    """A tensor of a compressed state: x ≈ `numbers` · `scale` (no scale: 1), where x was of the dtype `original`."""

    numbers: Shaped[Tensor, "..."]
    scale: Shaped[Tensor, "..."] | None
    original: str


def compress(state: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the state with its floating-point numbers in `dtype`: bfloat16 or float16, in half of the bytes of
    float32, or int8, in about a quarter, where each vector (the last dimension of a tensor) has a scale in float32, its
    largest number / 127.

    `restore` returns a state that can be extended, which differs by the rounding, at most 1/256, 1/2048 and 1/254 of a
    vector's largest number. Rows of a compressed state can be selected, joined, repeated and saved like those of any
    other. Tensors that `dtype` cannot hold, such as −inf in int8 or vectors of tiny numbers in float16, stay as they
    are."""
    check_compact(dtype)
    return map_state(lambda x: _compressed(x, dtype), restore(state))


def check_compact(dtype: torch.dtype) -> None:
    """Raise ValueError for a dtype that no state is compressed to."""
    if dtype not in COMPACT:
        names = ", ".join(str(x).removeprefix("torch.") for x in COMPACT)
        raise ValueError(f"a state is compressed to one of {names}, but dtype is {dtype}")


def restore(state: Any) -> Any:
    """Return a compressed state in the dtypes that it had before. Another state is returned as it is."""
    return map_state(_restored, state, leaf=Compressed)


def _compressed(x: Tensor, dtype: torch.dtype) -> Tensor | Compressed:
    if not x.is_floating_point() or x.element_size() <= dtype.itemsize:
        return x
    name = str(x.dtype).removeprefix("torch.")
    if dtype != torch.int8:
        numbers = x.to(dtype)
        return Compressed(numbers, None, name) if _holds(numbers, x) else x
    if x.ndim < 2 or x.shape[-1] + _SCALE.itemsize >= x.shape[-1] * x.element_size():
        return x
    largest = x.abs().amax(-1, keepdim=True)
    scale, least = largest.to(_SCALE) / 127, torch.finfo(_SCALE).tiny
    # a subnormal scale has lost its digits
    if not bool(((largest == 0) | ((scale >= least) & scale.isfinite())).all()):
        return x
    numbers = (x / scale.clamp(min=least)).round().to(torch.int8)
    return Compressed(numbers, scale, name)


def _holds(numbers: Tensor, x: Tensor) -> bool:
    """Return whether `numbers` are those of x but for rounding: none has become infinite, and none of a vector whose
    largest one is so small that the dtype has fewer digits for it."""
    large = numbers.isfinite() & (numbers.abs() >= torch.finfo(numbers.dtype).smallest_normal)
    small = (x != 0) & ~large.any(-1, keepdim=True)
    return not bool(((numbers.isinf() & x.isfinite()) | small).any())


def _restored(x: Compressed) -> Tensor:
    dtype = getattr(torch, x.original)
    return x.numbers.to(dtype) if x.scale is None else x.numbers.to(dtype) * x.scale.to(dtype)
