"""Conversions of other packages' weights into a model of ours: where each tensor comes from, and what becomes of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.ops.tokens.rotary import rotate


class Change(NamedTuple):
    """`apply` turns their tensor into ours. `shape` takes the shape of our tensor, and returns the shape that theirs
    must have."""

    apply: Callable[[Tensor], Tensor]
    shape: Callable[[torch.Size], Sequence[int]] = tuple


SAME = Change(lambda x: x)
TRANSPOSED = Change(lambda x: x.mT, lambda shape: shape[::-1])
ZEROS, ONES = Change(torch.zeros_like), Change(torch.ones_like)
# a number in a vector of one
NUMBER = Change(lambda x: x.squeeze(0), lambda shape: (1, *shape))
# the last dimension in another order
CHANNELS_AS_HALVES = Change(lambda x: x[..., halves(x.shape[-1])])


class Move(NamedTuple):
    """Our tensor `ours` becomes `change.apply` of their tensor `theirs`. If `theirs` is None, it becomes a constant:
    the change is applied to our own tensor."""

    ours: str
    theirs: str | None
    change: Change = SAME


Moves = Iterator[Move]


class Conversion(NamedTuple):
    """Describes how the weights for one constructor are converted.

    `moves` takes our model, and `aligned_rotary` as in `load`. All names in the original begin with one of `roots`.
    `arguments` takes a constructor and the original's arguments, and returns ours; `adapt` changes our model where its
    constructor cannot. Tensors of the original that match `left_out` are no weights; tensors of ours that match `new`
    are not in the original. `differences` yields a warning for each output that is not the original's."""

    moves: Callable[[Any, bool], Iterable[Move]]
    roots: tuple[str, ...]
    arguments: Callable[[type, Mapping[str, Any]], Mapping[str, Any]] = lambda constructor, config: config
    adapt: Callable[[Any], None] = lambda model: None
    left_out: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    differences: Callable[[Any], Iterable[str]] = lambda model: ()


def renamed(module: nn.Module, names: Mapping[str, str], **changes: Change) -> Moves:
    """Yield the moves of all parameters in parts of a module: `names` maps our name of a part to theirs, and `changes`
    our name to the change of its tensors, if there is one. A part may be None."""
    for ours, theirs in names.items():
        part = attrgetter(ours)(module)
        for name, _ in () if part is None else part.named_parameters():
            yield Move(f"{ours}.{name}", f"{theirs}.{name}", changes.get(ours, SAME))


def within(ours: str, theirs: str, moves: Iterable[Move]) -> Moves:
    """Put the name of a module, in our model and in theirs, before the names in the moves of its parameters."""
    for move in moves:
        yield move._replace(ours=_join(ours, move.ours), theirs=move.theirs and _join(theirs, move.theirs))


def half(which: int) -> Change:
    """Take the first half (0) or the second one (1) of the first dimension of their tensor."""
    return Change(lambda x: x.chunk(2)[which], lambda shape: (2 * shape[0], *shape[1:]))


def axis(which: int, of: int) -> Change:
    """Reshape the positions along the axis `which` of a grid of `of` axes: theirs are (1, …, length, …, 1, d), ours
    (length, d)."""
    ones = [1] * of
    return Change(lambda x: x.flatten(0, -2), lambda shape: (1, *ones[:which], shape[0], *ones[which + 1 :], shape[1]))


def columns(factor: Float[Tensor, " d"]) -> Change:
    return Change(lambda x: x * factor.to(x))


def heads(parts: Sequence[tuple[int, Callable[[Tensor], Tensor]]], head_dim: int) -> Change:
    """Apply a function to the rows (h, d, …) of each group of heads; a part is the number of heads and the function."""

    def apply(x: Tensor) -> Tensor:
        pieces = x.unflatten(0, (-1, head_dim)).split([count for count, _ in parts])
        return torch.cat([make(piece) for piece, (_, make) in zip(pieces, parts, strict=True)]).flatten(0, 1)

    return Change(apply)


def halves(head_dim: int) -> list[int]:
    """Return for each channel of a head of ours the index of the same channel of theirs. Two channels that are rotated
    together are neighbours in theirs, and c and c + d/2 in ours."""
    return [*range(0, head_dim, 2), *range(1, head_dim, 2)]


def pairs_as_halves(x: Float[Tensor, "h d *i"]) -> Float[Tensor, "h d *i"]:
    return x[:, halves(x.shape[1])]


def rotated_by(x: Float[Tensor, "h d *i"], position: int) -> Float[Tensor, "h d *i"]:
    """Rotate the rows x of a projection, which turns all its outputs by the rotary angles of this position."""
    flat = x.double().flatten(2).mT if x.ndim > 2 else x.double().unsqueeze(1)
    positions = torch.full((flat.shape[1],), position, device=x.device)
    return rotate(flat, positions).mT.reshape(x.shape).to(x.dtype)


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
