"""Decays between the tokens of a chunk as products of factors that are at most 1, however strong the decay.

A chunk is halved again and again. A query and a key are in two neighbouring blocks of s tokens for exactly one s, and
what decays between them is what decays from the key until the border times what decays since the border:

    exp(ℓ_{j+1} + … + ℓ_i) = until_j · since_i

Logarithms are never subtracted from one another, so a decay of −∞ needs no care: it is a factor of zero."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Factors(NamedTuple):
    """Decays of the blocks of `size` tokens: since the block began, the token's own included, and until it ends."""

    size: int
    since: Tensor  # (B, C/size, size, e), with e = 1 per head, d per channel
    until: Tensor


def factors(log_decay: Tensor) -> Iterator[Factors]:
    """Yield those of blocks of 1, 2, 4 … C tokens, given (B, C, e)."""
    since = log_decay.exp().unsqueeze(-2)
    until, size = torch.ones_like(since), 1
    yield Factors(size, since, until)
    while since.shape[1] > 1:
        (since_0, since_1), (until_0, until_1) = halves(since), halves(until)
        since = torch.cat([since_0, since_1 * since_0[..., -1:, :]], -2)
        until, size = torch.cat([until_0 * since_1[..., -1:, :], until_1], -2), 2 * size
        yield Factors(size, since, until)


def halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the second of each two neighbouring blocks, of (…, m, s, e)."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return first, second


def in_blocks(x: Tensor, size: int) -> Tensor:
    """(…, C, e) as (…, C/size, size, e)"""
    return x.unflatten(-2, (x.shape[-2] // size, size))


def corners(A: Tensor, size: int) -> Tensor:
    """View the blocks of (…, C, C) in which a second block's tokens meet the first's: (…, C/2s, s, s)."""
    return _blocks(A, size, 2 * size, size)


def diagonal(A: Tensor, size: int) -> Tensor:
    """View the blocks of (…, C, C) on its diagonal: (…, C/s, s, s)."""
    return _blocks(A, size, size, 0)


def _blocks(A: Tensor, size: int, step: int, down: int) -> Tensor:
    """View the blocks of (…, C, C) that begin `down` rows under its diagonal, every `step` rows."""
    *lead, C, _ = A.shape
    *strides, row, column = A.stride()
    shape, strides = (*lead, C // step, size, size), (*strides, step * (row + column), row, column)
    return A.as_strided(shape, strides, A.storage_offset() + down * row)


def between(decay: Tensor) -> Tensor:
    """Return what decays between two tokens, D_ij = α_{j+1} … α_i for j ≤ i, else 0: (B, C, C), given α (B, C, 1)."""
    D, size = torch.eye(decay.shape[1], dtype=decay.dtype, device=decay.device).repeat(decay.shape[0], 1, 1), 1
    while size < decay.shape[1]:
        first, second = halves(diagonal(D, size))
        since = second[..., :1] * halves(in_blocks(decay, size))[1][..., :1, :]
        torch.mul(since, first[..., -1:, :], out=corners(D, size))
        size *= 2
    return D


class Decays(NamedTuple):
    """Decays of a segment's chunks: since a chunk began and until it ends, (B, C, e), over it, (B, e, 1), and between
    its tokens: (B, 1, C, C) per head, as levels per channel."""

    since: Tensor
    until: Tensor
    over: Tensor
    between: Tensor | None
    levels: list[Factors]


def decays(log_decay: Tensor) -> Decays:
    """Return those of (B, C, e)."""
    if log_decay.shape[-1] > 1:
        levels = list(factors(log_decay))
        since, until = (x.squeeze(1) for x in levels[-1][1:])
        return Decays(since, until, since[:, -1].unsqueeze(-1), None, levels)
    decay = log_decay.exp()
    D = between(decay)
    since = D[..., :1] * decay[:, :1]
    return Decays(since, D[:, -1:].mT, since[:, -1:], D.unsqueeze(1), [])


def sum_since(x: Tensor) -> Tensor:
    """Σ_{i≥t} x_i over the tokens of (…, s, e): the gradient of decay t if x_i is since_i times its gradient."""
    return x.flip(-2).cumsum(-2).flip(-2)


def sum_until(x: Tensor) -> Tensor:
    """Σ_{j<t} x_j: likewise for until_j."""
    return F.pad(x, (0, 0, 1, -1)).cumsum(-2)


def similarities(x: Tensor, k: Tensor, levels: list[Factors]) -> Tensor:
    """P_ij = Σ_e x_ie k_je exp(ℓ_{j+1,e} + … + ℓ_ie) for j < i, else 0: (B, r, C, C) of x (B, r, C, e), k (B, C, e)."""
    P = x.new_zeros(*x.shape[:-1], x.shape[-2])
    for level in levels[:-1]:
        (rows, left), s = _sides(x, k, level), level.size
        # an outer product is less work than products of small matrices
        block = rows * left.mT if k.shape[-1] == 1 else rows @ left.mT
        corners(P, s).copy_(block.unflatten(-2, (-1, s)).movedim(-3, 1))
    return P


def _sides(x: Tensor, k: Tensor, level: Factors) -> tuple[Tensor, Tensor]:
    """Return what meets at the borders: (B, m, rs, e) of the second blocks, (B, m, s, e) of the first."""
    since, until = halves(level.since)[1], halves(level.until)[0]
    rows = (halves(in_blocks(x, level.size))[1] * since.unsqueeze(1)).movedim(1, 2)
    return rows.flatten(2, 3), halves(in_blocks(k, level.size))[0] * until


def similarities_gradient(dP: Tensor, x: Tensor, k: Tensor, levels: list[Factors]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, k and ℓ. Nothing is subtracted that decays apart, so strong decays keep theirs."""
    dx, dk = torch.zeros_like(x), torch.zeros_like(k)
    dl = torch.zeros_like(levels[-1].since.squeeze(1).expand(*k.shape[:-1], -1))
    for level in levels[:-1]:
        (rows, left), s = _sides(x, k, level), level.size
        G = corners(dP, s).movedim(1, 2).flatten(2, 3)
        drows, dleft = G @ left, G.mT @ rows
        own, other = (halves(in_blocks(y, s)) for y in (dl, dk))
        own[1].add_(sum_since((rows * drows).unflatten(2, (-1, s)).sum(2).sum_to_size(own[1].shape)))
        own[0].add_(sum_until((left * dleft).sum_to_size(own[0].shape)))
        other[0].addcmul_(dleft, halves(level.until)[0])
        since = halves(level.since)[1].unsqueeze(1)
        halves(in_blocks(dx, s))[1].addcmul_(drows.unflatten(2, (-1, s)).movedim(2, 1), since)
    return dx, dk, dl


def inverse(A: Tensor, M: Tensor) -> Tensor:
    """Return (I − A)⁻¹ in M, for strictly lower triangular A (B, C, C), from the blocks of 1, 2, 4 … tokens: each step
    is exact, and no power of A, which would overflow where keys repeat, is formed."""
    M.resize_(A.shape).copy_(torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))
    size = 1
    while size < A.shape[-1]:
        first, second = halves(diagonal(M, size))
        corners(M, size).copy_(second @ corners(A, size) @ first)
        size *= 2
    return M
