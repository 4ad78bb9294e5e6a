"""Inputs in the layout that kernels read, and launches: the steps of every operator here around its kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from linattn.ops.numerics import infinite_if_none
from linattn.ops.triton.layout import (
    Constants,
    StateStrides,
    Strides,
    TokenStrides,
    Walk,
    alignment,
    empty_like_tokens,
    opaque,
    readable,
    readable_scalars,
    unfold,
)
from linattn.ops.triton.maps import MAPS
from linattn.ops.triton.split_kernels import enter
from linattn.ops.triton.support import on_device_of
from linattn.ops.triton.tiling import PRECISION, Shape, Split, Tiles, enter_tiles, split


@dataclass
class Inputs:
    """The kernels' view of a call: `tokens` (…, n, d) by their names in kernels, the mask and the decay. Leading
    dimensions broadcast to `lead`, which are the rows."""

    lead: torch.Size
    tokens: dict[str, Tensor]
    dv: int
    feature_map: str
    normalized: bool = False
    key_mask: Tensor | None = None
    log_decay: Tensor | None = None

    def __post_init__(self) -> None:
        self.originals, self.tokens = self.tokens, {name: readable(x, self.lead) for name, x in self.tokens.items()}
        self.key_mask, self.log_decay = (readable_scalars(x, self.lead) for x in (self.key_mask, self.log_decay))
        first = next(iter(self.tokens.values()))
        self.n, self.f, self.device = first.shape[-2], first.shape[-1], first.device
        masked, decayed, precision = self.key_mask is not None, self.log_decay is not None, PRECISION[first.dtype]
        self.shape = Shape(self.f, self.dv, first.dtype, self.device, decayed)
        self.constants = Constants(self.normalized, masked, decayed, tl.constexpr(precision), self.f, self.dv)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def empty_gradient(self, name: str) -> Tensor:
        """Return memory for the gradient of input `name` per row, in float32 if it is to be summed over rows."""
        x = self.originals[name]
        if x.shape[:-2] == self.lead:
            return empty_like_tokens(self.tokens[name], x.shape[-1])
        return self.empty(*self.lead, *x.shape[-2:])


def _token_strides(x: Tensor | None, strides: Strides, dim: int, unit: int = 1) -> TokenStrides:
    """Return strides of x: those over the rows, `strides` / `unit`, and from token to token, that of `dim`. Those of
    None are zeros."""
    step = x.stride(dim) if x is not None and x.shape[dim] > 1 else 0
    outer, middle, inner = opaque(*(s // unit for s in strides))
    return TokenStrides(outer, middle, inner, tl.constexpr(step))


def in_words(key_mask: Tensor | None) -> Tensor | None:
    """Return a mask of 4 bytes per token: loads of one byte cannot start early."""
    return None if key_mask is None else key_mask.to(torch.int32)


def as_pointers(q: Tensor, key_mask: Tensor | None, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mask, as bytes, and the decay. If one is None, q stands in its place, and kernels do not read it."""
    if key_mask is not None and key_mask.dtype == torch.bool:
        key_mask = key_mask.view(torch.uint8)
    return q if key_mask is None else key_mask, q if log_decay is None else log_decay


class States(NamedTuple):
    """S (…, f, dv) and z (…, f) for a kernel, and their strides."""

    S: Tensor
    z: Tensor
    strides: StateStrides


class Rows:
    """The rows of a call, on which kernels are launched: `tokens` in the order of a kernel's arguments, with strides
    over the rows. z (…, f), a contiguous part of a state, shows how rows share states."""

    def __init__(self, inputs: Inputs, tokens: Sequence[Tensor], z: Tensor | None = None) -> None:
        scalars = inputs.key_mask, inputs.log_decay
        rows = unfold(inputs.lead, [*tokens, *scalars, z])
        *strides, of_mask, of_decay, of_state = rows.strides
        self.inputs, self.tokens, (self.number, self.size1, self.size2, _) = inputs, tuple(tokens), rows
        self.constants = inputs.constants._replace(UNIT=alignment(tokens, rows))
        self.state_strides = [s if z is None else s // max(1, z.shape[-1]) for s in of_state]
        self.scalars = as_pointers(tokens[0], *scalars)
        self.strides = (
            tuple(_token_strides(x, s, -2, self.constants.UNIT) for x, s in zip(tokens, strides, strict=True)),
            tuple(_token_strides(x, s, -1) for x, s in zip(scalars, (of_mask, of_decay), strict=True)),
        )

    def split(self, tiles: Tiles) -> Split:
        return split(self.inputs.n, self.number * tiles.parts, tiles.C, self.inputs.device)

    def shared(self, S: Tensor, z: Tensor) -> States:
        """Return the states S and z of the call with strides over the rows: zero over dimensions in which rows share a
        state, as the queries of a group do."""
        return States(S, z, StateStrides(*opaque(*self.state_strides, 0)))

    def separate(self, S: Tensor, z: Tensor, splits: int = 1) -> States:
        """Return S and z with the strides of contiguous states, one for each row and split."""
        strides = self.size1 * self.size2 * splits, self.size2 * splits, splits, int(splits > 1)
        return States(S, z, StateStrides(*opaque(*strides)))

    def arguments(
        self, tiles: Tiles, splits: Split, strides: Sequence[StateStrides], programs: int, **flags: bool
    ) -> tuple[tuple[int], dict[str, Any]]:
        """Return the grid, with `programs` per row and part of its channels, and a kernel's arguments but tensors.
        `flags` are fields of `Constants`. Parts of a row are neighbouring programs, as they read the same tokens."""
        integers = opaque(self.inputs.n, *splits, tiles.parts, self.size1, self.size2)
        return (self.number * programs * tiles.parts,), {
            "walk": Walk._make((*integers, *self.strides, tuple(strides))),
            "phi": MAPS[self.inputs.feature_map],
            "K": self.constants._replace(BF=tiles.BF, BV=tiles.BV, C=tiles.C, STAGES=tiles.num_stages, **flags),
            "num_warps": tiles.num_warps,
        }

    def launch(
        self,
        kernel: Any,
        tiles: Tiles,
        splits: Split,
        *states: States,
        numbers: Sequence[Tensor] = (),
        programs: int | None = None,
        **flags: bool,
    ) -> None:
        """Launch one program per row and split, or `programs` per row. Without rows, nothing is launched."""
        programs = splits.number if programs is None else programs
        grid, options = self.arguments(tiles, splits, [s.strides for s in states], programs, **flags)
        if self.number:
            with on_device_of(self.tokens[0]):
                kernel[grid](self.tokens, self.scalars, tuple((s.S, s.z) for s in states), tuple(numbers), **options)

    def enter(self, state: States, sums: "Sums", splits: Split, **flags: bool) -> States:
        """Scan over the splits, starting with `state`: overwrite the `sums` of each split with the state that enters
        it. Return these states. `flags` are constants of the kernel."""
        states, (f, dv) = self.separate(sums.S, sums.z, splits.number), sums.S.shape[-2:]
        tiles = enter_tiles(f, dv)
        self.launch(enter, tiles, splits, state, states, numbers=[sums.decay], programs=1, **flags)
        return states


class Sums(NamedTuple):
    """The sums of each split, S (…, splits, f, dv) and z (…, splits, f), and the product of its decays (…, splits)."""

    S: Tensor
    z: Tensor
    decay: Tensor


def sum_splits(
    inputs: Inputs, kernel: Any, tokens: Sequence[Tensor], splits: Split | None = None, numbers: Sequence[Tensor] = ()
) -> Sums:
    """Run `key_sums` or `query_sums` as `kernel` on all splits of `tokens`. None: the splits follow from the shapes."""
    rows, tiles = Rows(inputs, tokens), inputs.shape.over_values()
    splits = rows.split(tiles) if splits is None else splits
    shapes = (inputs.f, inputs.dv), (inputs.f,), ()
    sums = Sums(*(inputs.empty(*inputs.lead, splits.number, *shape) for shape in shapes))
    states = rows.separate(sums.S, sums.z, splits.number)
    rows.launch(kernel, tiles, splits, states, numbers=[*numbers, sums.decay])
    return sums


def launch_query_gradient(
    rows: Rows, kernel: Any, tiles: Tiles, splits: Split, state: States, numbers: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Run the kernel of the queries' gradient. Return 1/d, with the denominators d, and δ = dy·y per token, which the
    kernels of the other gradients read. Where each of several programs has a part of a row's features, the kernel runs
    twice: first for the sums over all parts."""
    inputs, shape = rows.inputs, (rows.number, tiles.parts, rows.inputs.n) if rows.inputs.normalized else (0,)
    inverse, delta, whole = inputs.empty(*shape), inputs.empty(*shape), tiles.parts == 1
    if inputs.normalized and not whole:
        rows.launch(kernel, tiles, splits, state, numbers=[inverse, delta, *numbers], SUMS=True)
        inverse = infinite_if_none(inverse.sum(1)).reciprocal()
        delta = delta.sum(1) * inverse
    sums = inputs.normalized and whole
    rows.launch(kernel, tiles, splits, state, numbers=[inverse, delta, *numbers], SUMS=sums, GRADIENT=True)
    return inverse, delta


def gradient_shape(x: Tensor, lead: Sequence[int]) -> Tensor:
    """Return an uninitialized tensor with the shape and strides of `summed(gradient, x)`, for x broadcast to `lead`."""
    return empty_like_tokens(readable(x, lead), x.shape[-1]) if x.shape[:-2] == lead else x.new_empty(x.shape)
