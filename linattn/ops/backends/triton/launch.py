"""Calls made readable for kernels, and launches: what every operator here does before and after its kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from linattn.ops.backends.base import infinite_if_none
from linattn.ops.backends.triton.layout import (
    States,
    Strided,
    Strides,
    Walk,
    empty_like_tokens,
    opaque,
    readable,
    readable_scalars,
    unfold,
    unit,
)
from linattn.ops.backends.triton.maps import MAPS
from linattn.ops.backends.triton.split_kernels import enter
from linattn.ops.backends.triton.tiling import PRECISION, Split, Tiles, over_values, split

_ENTER = 1024


@dataclass
class Call:
    """Tensors (…, n, d) by their names in kernels, the mask and the decay of a call in the rows of `lead`."""

    lead: torch.Size
    tokens: dict[str, Tensor]
    dv: int
    feature_map: str
    normalized: bool = False
    key_mask: Tensor | None = None
    log_decay: Tensor | None = None
    constants: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.given, self.tokens = self.tokens, {name: readable(x, self.lead) for name, x in self.tokens.items()}
        self.key_mask, self.log_decay = (readable_scalars(x, self.lead) for x in (self.key_mask, self.log_decay))
        first = next(iter(self.tokens.values()))
        self.n, self.f, self.device = first.shape[-2], first.shape[-1], first.device
        # what tiles are chosen by
        self.shape = (self.f, self.dv, first.dtype, self.device, self.log_decay is not None)
        phi, derivative = MAPS[self.feature_map]
        self.constants = {
            "PHI": phi, "DERIVATIVE": derivative, "NORMALIZED": self.normalized,
            "MASKED": self.key_mask is not None, "DECAYED": self.log_decay is not None,
            "PRECISION": PRECISION[first.dtype], "F": self.f, "DV": self.dv,
        }  # fmt: skip

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def empty_gradient(self, name: str) -> Tensor:
        """For a gradient in every row. Gradients of what serves several rows are summed in float32."""
        x = self.given[name]
        if x.shape[:-2] == self.lead:
            return empty_like_tokens(self.tokens[name], x.shape[-1])
        return self.empty(*self.lead, *x.shape[-2:])


def _strided(x: Tensor, strides: Strides, tokens: int, unit: int = 1) -> Strided:
    """Describe a tensor, whose tokens lie along the dimension `tokens`, in units.

    The step is compiled into kernels, as addresses of a tile then differ by constants and take few registers; other
    lengths and batches do not change it."""
    step = x.stride(tokens) if x.shape[tokens] > 1 else 0
    return Strided(x, *opaque(*(s // unit for s in strides)), tl.constexpr(step))  # type: ignore[arg-type]


def _strided_scalars(x: Tensor | None, strides: Strides, absent: Tensor) -> Strided:
    """Describe a mask or a decay (…, n) to kernels, which read none of `absent`."""
    if x is None:
        return Strided(absent, *opaque(0, 0, 0), tl.constexpr(0))  # type: ignore[arg-type]
    return _strided(x.view(torch.uint8) if x.dtype == torch.bool else x, strides, -1)


class Rows:
    """The tensors that a kernel is given, as it takes them, and how to launch it; z (…, f) is contiguous."""

    def __init__(self, call: Call, tokens: dict[str, Tensor], z: Tensor | None = None) -> None:
        tensors = list(tokens.values())
        rows = unfold(call.lead, [*tensors, call.key_mask, call.log_decay, z])
        *strides, of_mask, of_decay, of_state = rows.strides
        width = unit(tensors, rows)
        self.call, self.first, (self.number, self.size1, self.size2, _) = call, tensors[0], rows
        self.state_strides = [s if z is None else s // max(1, z.shape[-1]) for s in of_state]
        self.arguments = {
            **call.constants,
            **{name: _strided(x, s, -2, width) for (name, x), s in zip(tokens.items(), strides, strict=True)},
            "key_mask": _strided_scalars(call.key_mask, of_mask, tensors[0]),
            "log_decay": _strided_scalars(call.log_decay, of_decay, tensors[0]),
            "UNIT": width,
        }

    def split(self, tiles: Tiles) -> Split:
        return split(self.call.n, self.number * tiles.parts, tiles.C, self.call.device)

    def shared(self, S: Tensor, z: Tensor) -> States:
        """States that lie as the z that the rows were made with, so that several rows may share one."""
        return States(S, z, *opaque(*self.state_strides, 0))

    def separate(self, S: Tensor, z: Tensor, splits: int = 1) -> States:
        """States of each row and split, one after another."""
        return States(S, z, *opaque(self.size1 * self.size2 * splits, self.size2 * splits, splits, 1))

    def launch(self, kernel: Any, tiles: Tiles, splits: Split, **arguments: object) -> None:
        self.run(kernel, splits.number, splits, **self.arguments, **tiles._asdict(), **arguments)

    def run(self, kernel: Any, programs: int, splits: Split, **arguments: Any) -> None:
        """Launch so many programs for each row, times its parts. Without rows, nothing is launched."""
        grid, named = self.prepared(kernel, programs, splits, **arguments)
        if self.number:
            with torch.cuda.device_of(self.first):
                kernel[grid](**named)

    def prepared(
        self, kernel: Any, programs: int, splits: Split, *, parts: int, **arguments: Any
    ) -> tuple[tuple[int], dict[str, Any]]:
        """Return a grid, in which the parts of a row start side by side, as they read the same tokens, and the
        arguments that a kernel names."""
        arguments["walk"] = Walk(*opaque(self.call.n, *splits, parts, self.size1, self.size2))
        wanted = {"num_warps", "num_stages", *kernel.arg_names} & arguments.keys()
        return (self.number * programs * parts,), {name: arguments[name] for name in wanted}

    def enter(self, state: States, sums: "Sums", splits: Split, **constants: bool) -> States:
        """Turn each split's own sums into the states that enter it, in place."""
        entering, (f, dv) = self.separate(sums.S, sums.z, splits.number), sums.S.shape[-2:]
        arguments = {"state": state, "sums": entering, "kept": sums.kept, "F": f, "DV": dv, "B": _ENTER}
        self.run(enter, 1, splits, parts=-(-f * dv // _ENTER) + 1, **arguments, **constants)
        return entering


class Sums(NamedTuple):
    """Sums of each split by itself, S (…, splits, f, dv) and z (…, splits, f), and its whole decay (…, splits)."""

    S: Tensor
    z: Tensor
    kept: Tensor


def sum_splits(
    call: Call, kernel: Any, tokens: dict[str, Tensor], splits: Split | None = None, **arguments: object
) -> Sums:
    """Sum the keys or the queries of each split; it chooses the splits if none are given."""
    rows, tiles = Rows(call, tokens), over_values(*call.shape)
    splits = rows.split(tiles) if splits is None else splits
    shapes = (call.f, call.dv), (call.f,), ()
    sums = Sums(*(call.empty(*call.lead, splits.number, *shape) for shape in shapes))
    states = rows.separate(sums.S, sums.z, splits.number)
    rows.launch(kernel, tiles, splits, sums=states, kept=sums.kept, **arguments)
    return sums


def launch_query_gradient(
    rows: Rows, kernel: Any, tiles: Tiles, splits: Split, **arguments: object
) -> dict[str, Tensor]:
    """Run the kernel of the queries' gradient and return the denominators, for the kernels of the other gradients.
    Where several programs share the features of a row, it runs twice."""
    call, shape = rows.call, (rows.number, tiles.parts, rows.call.n) if rows.call.normalized else (0,)
    found = {"inverse": call.empty(*shape), "delta": call.empty(*shape)}
    whole = tiles.parts == 1
    if call.normalized and not whole:
        rows.launch(kernel, tiles, splits, **arguments, **found, SUMS=True, GRADIENT=False)
        inverse = infinite_if_none(found["inverse"].sum(1)).reciprocal()
        found = {"inverse": inverse, "delta": found["delta"].sum(1) * inverse}
    rows.launch(kernel, tiles, splits, **arguments, **found, SUMS=call.normalized and whole, GRADIENT=True)
    return found


def summed(gradient: Tensor, x: Tensor) -> Tensor:
    """Sum a gradient in every row over the rows that x serves."""
    return gradient if gradient.shape == x.shape else gradient.sum_to_size(*x.shape).to(x.dtype)


def gradient_shape(x: Tensor, lead: Sequence[int]) -> Tensor:
    """An empty tensor that lies as what `summed` returns."""
    return empty_like_tokens(readable(x, lead), x.shape[-1]) if x.shape[:-2] == lead else x.new_empty(x.shape)
