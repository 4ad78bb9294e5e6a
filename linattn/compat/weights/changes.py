"""Changes turn a tensor of another package into one of ours."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.ops.rotary import rotate


class Change(NamedTuple):
    """A function of a tensor. `shape` takes the shape of ours and returns that of theirs."""

    shape: Callable[[torch.Size], Sequence[int]]
    apply: Callable[[Tensor], Tensor]


SAME = Change(tuple, lambda x: x)
TRANSPOSED = Change(lambda shape: shape[::-1], lambda x: x.mT)
ZEROS = Change(tuple, torch.zeros_like)
ONES = Change(tuple, torch.ones_like)
# a number in a vector of one
NUMBER = Change(lambda shape: (1, *shape), lambda x: x.squeeze(0))


def half(which: int) -> Change:
    """Take one half of the first dimension: 0 or 1."""
    return Change(lambda shape: (2 * shape[0], *shape[1:]), lambda x: x.chunk(2)[which])


def axis(which: int, of: int) -> Change:
    """Turn a table that is spread over a grid into one row for each place on one axis."""
    ones = [1] * of

    def shape(ours: torch.Size) -> Sequence[int]:
        return (1, *ones[:which], ours[0], *ones[which + 1 :], ours[1])

    return Change(shape, lambda x: x.flatten(0, -2))


def columns(factor: Float[Tensor, " d"]) -> Change:
    return Change(tuple, lambda x: x * factor.to(x))


def channels(order: Sequence[int]) -> Change:
    """Put the last dimension into another order."""
    return Change(tuple, lambda x: x[..., list(order)])


def heads(parts: Sequence[tuple[int, Callable[[Tensor], Tensor]]], head_dim: int) -> Change:
    """Apply to the rows of each group of heads, (h, d, …), a function of its own."""

    def apply(x: Tensor) -> Tensor:
        pieces = x.unflatten(0, (-1, head_dim)).split([count for count, _ in parts])
        return torch.cat([make(piece) for piece, (_, make) in zip(pieces, parts, strict=True)]).flatten(0, 1)

    return Change(tuple, apply)


def halves(head_dim: int) -> list[int]:
    """Return where each of our channels is in theirs: their rotary pairs are neighbours, ours are the two halves."""
    return [*range(0, head_dim, 2), *range(1, head_dim, 2)]


def pairs_as_halves(x: Float[Tensor, "h d *i"]) -> Float[Tensor, "h d *i"]:
    return x[:, halves(x.shape[1])]


def rotated_by(x: Float[Tensor, "h d *i"], places: int) -> Float[Tensor, "h d *i"]:
    """Rotate the rows so that their products are rotated by so many places."""
    flat = x.double().flatten(2).mT if x.ndim > 2 else x.double().unsqueeze(1)
    positions = torch.full((flat.shape[1],), places, device=x.device)
    return rotate(flat, positions).mT.reshape(x.shape).to(x.dtype)
