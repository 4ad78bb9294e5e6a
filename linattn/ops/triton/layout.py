"""The memory layout that kernels take: three leading dimensions, strides in units, channels side by side.

The rows of a call are all its leading dimensions together. A tensor that is broadcast over some of them has strides of
zero there, so grouped queries and heads that were transposed are read in place."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# kernels count places inside a chunk in 32 bits
_LARGEST_STEP = 2**31 // 128
_DIMENSIONS = 3

Strides = tuple[int, int, int]


class Rows(NamedTuple):
    """`number` rows, unfolded into (…, size1, size2), and the strides of each tensor over the three."""

    number: int
    size1: int
    size2: int
    strides: list[Strides]


class TokenStrides(NamedTuple):
    """The strides of a tensor (…, n, d) or (…, n): over the rows, opaque, and from token to token.

    As the last one is compiled into kernels, addresses of a tile differ by constants and take few registers; other
    lengths and batches do not change it."""

    outer: int
    middle: int
    inner: int
    step: Any


class StateStrides(NamedTuple):
    """The strides of S (…, f, dv) and z (…, f) over the rows and their splits, in states; opaque."""

    outer: int
    middle: int
    inner: int
    split: int


class Walk(NamedTuple):
    """The integers by which programs find their tokens: n in a row, `length` in each of its splits; and `parts`, the
    number of programs that share the channels of a row. Opaque. Then the strides of a kernel's tensors in its order."""

    n: int
    length: int
    splits: int
    parts: int
    size1: int
    size2: int
    tokens: tuple[TokenStrides, ...]
    scalars: tuple[TokenStrides, ...]
    states: tuple[StateStrides, ...]


class Constants(NamedTuple):
    """Constants that are compiled into a kernel, beside φ: a call's options, its widths, and the kind of product; the
    unit of strides; tiles of BF features, BV values and C tokens, loaded in STAGES; and what some kernels are asked
    for."""

    NORMALIZED: bool
    MASKED: bool
    DECAYED: bool
    PRECISION: Any
    F: int
    DV: int
    UNIT: int = 1
    BF: int = 0
    BV: int = 0
    C: int = 0
    STAGES: int = 1
    SUMS: bool = False
    GRADIENT: bool = False
    KEYS: bool = False
    VALUES: bool = False
    REVERSE: bool = False
    SHARED: bool = False


def opaque(*integers: int) -> tuple[int, ...]:
    """Make all integers multiples of 16. For one in a tuple that becomes such a multiple, or 1, Triton would compile
    another kernel, but a new length or a new batch is no new kernel. `device.plain` reads them."""
    return tuple([16 * x for x in integers])


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Launch kernels on the GPU that holds x."""
    return torch.accelerator.device_index(None if x.is_cpu else x.get_device())


def unfold(lead: Sequence[int], tensors: Sequence[Tensor | None]) -> Rows:
    """Merges leading dimensions wherever all the tensors allow it."""
    table = [[0 if x is None or x.shape[i] == 1 else x.stride(i) for x in tensors] for i in range(len(lead))]
    sizes: list[int] = []
    columns: list[list[int]] = []
    for size, column in zip(lead, table, strict=True):
        if size == 1:
            continue
        if sizes and all(outer == inner * size for outer, inner in zip(columns[-1], column, strict=True)):
            sizes[-1], columns[-1] = sizes[-1] * size, column
        else:
            sizes.append(size)
            columns.append(column)
    missing = _DIMENSIONS - len(sizes)
    assert missing >= 0, "more than three leading dimensions are made to lie one after another before"
    sizes = [1] * missing + sizes
    columns = [[0] * len(tensors)] * missing + columns
    return Rows(math.prod(sizes), sizes[1], sizes[2], list(zip(*columns, strict=True)))  # type: ignore[arg-type]


def many(lead: Sequence[int]) -> bool:
    """Return whether there are more leading dimensions than kernels take, so that inputs are copied to lie in one."""
    return sum(size != 1 for size in lead) > _DIMENSIONS


def shared_in_turns(lead: Sequence[int], sums: Sequence[int]) -> int:
    """Dimensions that are left of these if they lie one after another and the sums serve several rows along some."""
    sharing = [here != size for size, here in zip(lead, sums, strict=True) if size != 1]
    return sum(i == 0 or sharing[i] != sharing[i - 1] for i in range(len(sharing)))


def readable(x: Tensor, lead: Sequence[int]) -> Tensor:
    """Itself, or a copy if its channels do not lie side by side, or tokens too far apart."""
    if many(lead):
        return x.expand(*lead, *x.shape[-2:]).contiguous()
    near = x.shape[-2] == 1 or x.stride(-2) < _LARGEST_STEP
    return x if (x.shape[-1] == 1 or x.stride(-1) == 1) and near else x.contiguous()


def readable_scalars(x: Tensor | None, lead: Sequence[int]) -> Tensor | None:
    """Make kernel arguments of a mask or a decay (…, n)."""
    return x if x is None or not many(lead) else x.expand(*lead, x.shape[-1]).contiguous()


def empty_like_tokens(x: Tensor, channels: int) -> Tensor:
    """Room for so many channels of each token of x, in the order in which those of x lie if there are as many."""
    if channels == x.shape[-1] and x.stride(-1) == 1 and not many(x.shape[:-2]):
        return torch.empty_like(x)
    return x.new_empty(*x.shape[:-1], channels)


def empty_outputs(q: Tensor, lead: Sequence[int], channels: int) -> Tensor:
    """Return outputs without numbers, one for each row, also of those that share queries. They lie as q does if it has
    all rows."""
    if q.shape[:-2] == torch.Size(lead):
        return empty_like_tokens(q, channels)
    return q.new_empty(*lead, q.shape[-2], channels)


def unit(wide: Sequence[Tensor], rows: Rows) -> int:
    """The largest power of two, up to 16 numbers, that divides every stride: kernels read so many at a time. Channels
    decide it, hardly ever the length, so that a new length is no new kernel."""
    steps = (x.stride(-2) if x.shape[-2] > 1 else 0 for x in wide)
    return math.gcd(16, *(s for strides in rows.strides[: len(wide)] for s in strides), *steps)
