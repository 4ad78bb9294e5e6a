"""Conversions of other packages' weights into a model of ours: where each tensor comes from, and what becomes of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.ops.rotary import rotate


class Change(NamedTuple):
    """A function of a tensor. `shape` takes the shape of ours and returns that of theirs."""

    shape: Callable[[torch.Size], Sequence[int]]
    apply: Callable[[Tensor], Tensor]


class Move(NamedTuple):
    """The tensor `ours` is `change.apply(theirs)`; if `theirs` is None, it is a constant, made from its own shape."""

    ours: str
    theirs: str | None
    change: Change


class Conversion(NamedTuple):
    """The weights of one constructor.

    `build` takes the original's arguments. `moves` takes our model, and whether rotary angles of performer-pytorch's
    local heads were aligned. Their names begin with one of `roots`. Of theirs, names that match `left_out` are no
    weights; of ours, those that match `new` have no counterpart there. `differences` yields a warning for each output
    that is not the original's."""

    build: Callable[[Mapping[str, Any]], nn.Module]
    moves: Callable[[Any, bool], Iterable[Move]]
    roots: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    differences: Callable[[Any], Iterable[str]] = lambda model: ()


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


def parameters(ours: str, theirs: str, module: nn.Module, change: Change = SAME) -> Iterator[Move]:
    """Move all parameters of a module, whose names there are the same."""
    for name, _ in module.named_parameters():
        yield Move(f"{ours}.{name}", f"{theirs}.{name}", change)
