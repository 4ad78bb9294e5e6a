"""How one tensor of ours comes from one of theirs: its old name, its old shape, and what becomes of it."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.ops.rotary import rotate


class Change(NamedTuple):
    """`shape` is that of theirs, from that of ours."""

    shape: Callable[[torch.Size], Sequence[int]]
    apply: Callable[[Tensor], Tensor]


class Move(NamedTuple):
    """Ours is what `change` makes of theirs, or, where they have nothing, of ours itself: a constant."""

    ours: str
    theirs: str | None
    change: Change


SAME = Change(tuple, lambda x: x)
TRANSPOSED = Change(lambda shape: shape[::-1], lambda x: x.mT)
ZEROS = Change(tuple, torch.zeros_like)
ONES = Change(tuple, torch.ones_like)
# a number in a vector of one
NUMBER = Change(lambda shape: (1, *shape), lambda x: x.squeeze(0))


def half(which: int) -> Change:
    """Of the first dimension."""
    return Change(lambda shape: (2 * shape[0], *shape[1:]), lambda x: x.chunk(2)[which])


def axis(which: int, of: int) -> Change:
    """A row for each place on one axis of a grid: theirs spreads over the whole grid."""
    ones = [1] * of

    def shape(ours: torch.Size) -> Sequence[int]:
        return (1, *ones[:which], ours[0], *ones[which + 1 :], ours[1])

    return Change(shape, lambda x: x.flatten(0, -2))


def columns(factor: Float[Tensor, " d"]) -> Change:
    return Change(tuple, lambda x: x * factor.to(x))


def channels(order: Sequence[int]) -> Change:
    """The last dimension in another order."""
    return Change(tuple, lambda x: x[..., list(order)])


def heads(parts: Sequence[tuple[int, Callable[[Tensor], Tensor]]], head_dim: int) -> Change:
    """The rows of so many heads each become what a function makes of them, (h, d, …)."""

    def apply(x: Tensor) -> Tensor:
        pieces = x.unflatten(0, (-1, head_dim)).split([count for count, _ in parts])
        return torch.cat([make(piece) for piece, (_, make) in zip(pieces, parts, strict=True)]).flatten(0, 1)

    return Change(tuple, apply)


def halves(head_dim: int) -> list[int]:
    """Their rotary pairs are neighbouring channels, ours the two halves: where each of our channels is in theirs."""
    return [*range(0, head_dim, 2), *range(1, head_dim, 2)]


def pairs_as_halves(x: Float[Tensor, "h d *i"]) -> Float[Tensor, "h d *i"]:
    return x[:, halves(x.shape[1])]


def turned(x: Float[Tensor, "h d *i"], places: int) -> Float[Tensor, "h d *i"]:
    """The rows whose products are rotated by so many places."""
    flat = x.double().flatten(2).mT if x.ndim > 2 else x.double().unsqueeze(1)
    positions = torch.full((flat.shape[1],), places, device=x.device)
    return rotate(flat, positions).mT.reshape(x.shape).to(x.dtype)


def parameters(ours: str, theirs: str, module: nn.Module, change: Change = SAME) -> Iterator[Move]:
    """All of a module, under the names that both have."""
    for name, _ in module.named_parameters():
        yield Move(f"{ours}.{name}", f"{theirs}.{name}", change)
