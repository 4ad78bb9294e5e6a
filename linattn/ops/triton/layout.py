"""The memory layout that kernels read: three leading dimensions, strides in units, contiguous channels.

A row is one sequence of one head: the rows of a call are all its leading dimensions together. A split is one of the
equal parts into which the tokens of a row are cut, so that several programs can work on one row. A tensor that is
broadcast over some of them has strides of zero there, so grouped queries and heads that were transposed are read in
place."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# kernels count places inside a chunk in 32 bits
_LARGEST_STEP = 2**31 // 128
_DIMENSIONS = 3

Strides = tuple[int, int, int]


class Rows(NamedTuple):
    """The rows of a call, `number` in all, as three dimensions of which the last two have `size1` and `size2` entries,
    and the strides of each tensor over these three."""

    number: int
    size1: int
    size2: int
    strides: list[Strides]


class TokenStrides(NamedTuple):
    """The strides of a tensor (…, n, d) or (…, n): over the rows (`opaque`), and from token to token.

    The last one is compiled into kernels: addresses of a tile then differ by constants and take few registers. It does
    not depend on the length or the batch."""

    outer: int
    middle: int
    inner: int
    step: Any


class StateStrides(NamedTuple):
    """The strides of S (…, f, dv) and z (…, f) over the rows and their splits, counted in whole states. Kernels do not
    specialize on them (`opaque`)."""

    outer: int
    middle: int
    inner: int
    split: int


class Walk(NamedTuple):
    """The integers that locate a program's tokens, all `opaque`: n tokens per row, `length` per split, `splits` per
    row, `parts`, the number of programs that share the channels of a row, and the sizes of `Rows`. Then the strides of
    the tensors, in the order of a kernel's arguments."""

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
    """Constants that are compiled into a kernel, beside φ: a call's options, its widths, and the precision of products;
    the unit of strides; tiles of BF features, BV values and C tokens, loaded in STAGES; and flags that choose the
    results of some kernels."""

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
    """Multiply all integers by 16; `device.plain` divides by 16. Triton compiles separate kernels for arguments that
    are 1 or a multiple of 16: as all are multiples, a new length or batch needs no new kernel."""
    return tuple([16 * x for x in integers])


def unfold(lead: Sequence[int], tensors: Sequence[Tensor | None]) -> Rows:
    """Merge the dimensions `lead`, to which all tensors broadcast, wherever the strides of all of them allow it."""
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
    assert missing >= 0, "more than three leading dimensions are made contiguous before"
    sizes = [1] * missing + sizes
    columns = [[0] * len(tensors)] * missing + columns
    return Rows(math.prod(sizes), sizes[1], sizes[2], list(zip(*columns, strict=True)))  # type: ignore[arg-type]


def too_many_dimensions(lead: Sequence[int]) -> bool:
    """Return whether `lead` has more dimensions than kernels take, so that inputs must be copied to contiguous ones."""
    return sum(size != 1 for size in lead) > _DIMENSIONS


def shared_groups(lead: Sequence[int], states: Sequence[int]) -> int:
    """Count runs of neighbouring dimensions of `lead` in which all share `states` (size 1 there), or none does."""
    sharing = [count != size for size, count in zip(lead, states, strict=True) if size != 1]
    return sum(i == 0 or sharing[i] != sharing[i - 1] for i in range(len(sharing)))


def readable(x: Tensor, lead: Sequence[int]) -> Tensor:
    """Return x, or a contiguous copy if its last stride is not 1, its token stride too large or `lead` too long."""
    if too_many_dimensions(lead):
        return x.expand(*lead, *x.shape[-2:]).contiguous()
    near = x.shape[-2] == 1 or x.stride(-2) < _LARGEST_STEP
    return x if (x.shape[-1] == 1 or x.stride(-1) == 1) and near else x.contiguous()


def readable_scalars(x: Tensor | None, lead: Sequence[int]) -> Tensor | None:
    """Return x, a mask or a decay (…, n), or a contiguous copy if `lead` has too many dimensions."""
    return x if x is None or not too_many_dimensions(lead) else x.expand(*lead, x.shape[-1]).contiguous()


def empty_like_tokens(x: Tensor, channels: int) -> Tensor:
    """Return an uninitialized tensor (…, n, channels), with the strides of x if it has as many channels."""
    if channels == x.shape[-1] and x.stride(-1) == 1 and not too_many_dimensions(x.shape[:-2]):
        return torch.empty_like(x)
    return x.new_empty(*x.shape[:-1], channels)


def empty_outputs(q: Tensor, lead: Sequence[int], channels: int) -> Tensor:
    """Return uninitialized outputs (*lead n channels), with the strides of q if it has all leading dimensions."""
    if q.shape[:-2] == torch.Size(lead):
        return empty_like_tokens(q, channels)
    return q.new_empty(*lead, q.shape[-2], channels)


def alignment(tokens: Sequence[Tensor], rows: Rows) -> int:
    """Return the largest power of two, up to 16, that divides every stride of `tokens`, the first tensors of `rows`:
    kernels read so many numbers at a time. It hardly ever depends on the length, and a new one needs no new kernel."""
    steps = (x.stride(-2) if x.shape[-2] > 1 else 0 for x in tokens)
    return math.gcd(16, *(s for strides in rows.strides[: len(tokens)] for s in strides), *steps)
