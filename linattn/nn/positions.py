"""Position embeddings, added to those of tokens. Positions count present tokens only (`count_positions`). Vaswani et
al., https://arxiv.org/abs/1706.03762 (sinusoidal); Kitaev et al., Reformer, https://arxiv.org/abs/2001.04451 (axial)"""

import math
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linattn.checks import check_numbers, check_sizes, check_tensors, check_types, given
from linattn.nn.checks import out_of_range
from linattn.ops.tokens.rotary import angles

INIT_STD = 0.02


@final
class LearnedPositions(nn.Module):
    """A learned vector of `dim` channels for each of `max_length` positions, drawn with the standard deviation
    `std`. Later positions are an error."""

    @check_types
    def __init__(self, max_length: int, dim: int, *, std: float = INIT_STD):
        super().__init__()
        check_sizes(max_length=max_length, dim=dim)
        self.max_length, self.std = max_length, std
        self.weight = nn.Parameter(torch.empty(max_length, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, positions: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n d"]:
        _check_positions(positions)
        return _rows(self.weight, positions, positions, self.max_length)

    def extra_repr(self) -> str:
        return f"{self.max_length}, {self.weight.shape[1]}"


@final
class SinusoidalPositions(nn.Module):
    """[sin(p ω), cos(p ω)] with ω_c = base^(−2c/dim): sines in the first half of the `dim` channels and cosines in the
    second, not alternating as in the paper. A larger `base` makes the slowest waves longer, up to 2π·base positions. It
    has no weights and no longest length."""

    max_length = None
    dtype_holder: Tensor

    @check_types
    def __init__(self, dim: int, *, base: float = 10000.0):
        super().__init__()
        check_sizes(dim=dim)
        check_numbers(least=1.0, base=base)
        self.dim, self.base = dim, base
        # it is empty: it only follows the model's dtype when `to` changes it
        self.register_buffer("dtype_holder", torch.empty(0), persistent=False)

    def forward(self, positions: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n d"]:
        _check_positions(positions)
        angle = angles(positions, -(-self.dim // 2), self.dim / 2, base=self.base)
        table = torch.cat([angle.sin(), angle.cos()], -1)[..., : self.dim]
        return table.to(self.dtype_holder.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}"


@final
class AxialPositions(nn.Module):
    """The position is a cell of a grid of the given `shape`, counted row by row; its vector is the sum of one learned
    vector of `dim` channels per axis: (64, 128) has 8,192 positions with 192 vectors. At first these sums have the
    standard deviation `std`. Positions from `max_length` on (default: beyond the grid) are an error."""

    @check_types
    def __init__(self, dim: int, shape: tuple[int, ...], *, max_length: int | None = None, std: float = INIT_STD):
        super().__init__()
        check_sizes(dim=dim, axes=len(shape), shape=shape, **given(max_length=max_length))
        self.shape, self.std = tuple(shape), std
        self.max_length = math.prod(shape) if max_length is None else max_length
        if self.max_length > math.prod(shape):
            raise ValueError(f"the grid {self.shape} has {math.prod(shape)} positions, but max_length is {max_length}")
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(length, dim)) for length in shape)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # the sum has the variance of one table's rows
        for weight in self.weights:
            nn.init.normal_(weight, std=self.std / math.sqrt(len(self.shape)))

    def forward(self, positions: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n d"]:
        _check_positions(positions)
        parts, rest = [], positions
        for length, weight in zip(self.shape[:0:-1], list(self.weights)[:0:-1], strict=True):
            parts.append(weight[rest % length])
            rest = rest // length
        rest = rest.masked_fill(positions >= self.max_length, self.shape[0])
        return sum(parts, _rows(self.weights[0], rest, positions, self.max_length))

    def extra_repr(self) -> str:
        return f"{self.weights[0].shape[1]}, {self.shape}"


def _check_positions(positions: Tensor) -> None:
    check_tensors(positions=positions)
    if positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"positions must be torch.int64 or torch.int32, but are {positions.dtype}")


def _rows(table: Tensor, rows: Tensor, positions: Tensor, max_length: int) -> Tensor:
    try:
        return nn.functional.embedding(rows, table)
    except IndexError as error:
        raise out_of_range("positions", positions, max_length) from error
