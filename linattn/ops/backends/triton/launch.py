"""Launches from tensors: what every operator here does before and after its kernels."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.backends.base import infinite_if_none
from linattn.ops.backends.triton.layout import Rows, scalar_arguments, unfold, unit, wide_arguments
from linattn.ops.backends.triton.split_kernels import enter
from linattn.ops.backends.triton.tiling import Tiles

_ENTER = 1024


class Arguments(NamedTuple):
    """Kernel arguments of tensors with channels, of the mask and the decay; and a state's strides over the rows, in
    states."""

    rows: Rows
    unit: int
    wide: list[list[object]]
    key_mask: list[object]
    log_decay: list[object]
    state: list[int]


def arguments(
    lead: Sequence[int], wide: Sequence[Tensor], key_mask: Tensor | None, log_decay: Tensor | None, z: Tensor | None
) -> Arguments:
    """Make kernel arguments of tensors that `layout.readable` has made readable; z (…, f) is contiguous."""
    rows = unfold(lead, [*wide, key_mask, log_decay, z])
    width = unit(wide, rows)
    *_, of_mask, of_decay, of_state = rows.strides
    features = 1 if z is None else max(1, z.shape[-1])
    return Arguments(
        rows,
        width,
        wide_arguments(wide, rows, width),
        scalar_arguments(key_mask, of_mask, wide[0]),
        scalar_arguments(log_decay, of_decay, wide[0]),
        [s // features for s in of_state],
    )


def launch(kernel: Any, grid: tuple[int, int], groups: Sequence[object], tiles: Tiles, **constants: Any) -> None:
    """Groups of arguments in the kernel's order. A call without rows launches nothing."""
    flat = [x for group in groups for x in (group if isinstance(group, list) else [group])]
    if grid[0] == 0:
        return
    with torch.cuda.device_of(flat[0]):
        kernel[grid](
            *flat,
            BF=tiles.BF,
            BV=tiles.BV,
            C=tiles.C,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **constants,
        )


class Denominators(NamedTuple):
    """Each query's 1/d and δ, or each program's shares of d and of δ d; empty if the output is not normalised."""

    inverse: Tensor
    delta: Tensor


def with_denominators(
    run: Callable[..., None], q: Tensor, shape: tuple[int, int, int], normalized: bool
) -> Denominators:
    """Run the kernel of the queries' gradient, `run(denominators, sums=…, gradient=…)`, for `shape` = (rows, programs
    of a row, tokens). Where several programs share the features of a row, it runs twice."""
    if not normalized:
        found = Denominators(*(q.new_empty(0, dtype=torch.float32) for _ in range(2)))
        run(found, sums=False, gradient=True)
        return found
    found = Denominators(*(q.new_empty(shape, dtype=torch.float32) for _ in range(2)))
    run(found, sums=True, gradient=shape[1] == 1)
    if shape[1] > 1:
        inverse = infinite_if_none(found.inverse.sum(1)).reciprocal()
        found = Denominators(inverse, found.delta.sum(1) * inverse)
        run(found, sums=False, gradient=True)
    return found


class Splits(NamedTuple):
    """The states at the splits of each row: S and z of one after the other in `parts` (rows · splits, f·dv + f)."""

    parts: Tensor
    whole: Tensor
    features: int

    @staticmethod
    def empty(count: int, f: int, dv: int, x: Tensor) -> "Splits":
        parts = x.new_empty(count, f * dv + f, dtype=torch.float32)
        return Splits(parts, x.new_empty(count, dtype=torch.float32), f)

    @property
    def S_and_z(self) -> list[Tensor]:
        width = self.parts.shape[1]
        return [self.parts, self.parts.narrow(1, width - self.features, self.features)]

    @property
    def units(self) -> list[int]:
        return [self.parts.shape[1]] * 2


def enter_splits(
    splits: Splits, number: int, S: Tensor, z: Tensor, args: Arguments, *, reverse: bool, shared: bool
) -> None:
    """Turn each split's own sums into the states that enter it, in place."""
    width = splits.parts.shape[1]
    rows, state = args.rows, width - splits.features
    grid = (rows.number, -(-width // _ENTER))
    with torch.cuda.device_of(S):
        enter[grid](
            splits.parts, splits.whole, S, z, *args.state, number, rows.size1, rows.size2,
            REVERSE=reverse, SHARED=shared, STATE=state, WIDTH=width, B=_ENTER,
        )  # fmt: skip
