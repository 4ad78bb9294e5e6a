"""Gated linear attention, with a decay per channel: S_t = diag(α_t) S_{t−1} + k_t v_tᵀ. Yang et al.,
https://arxiv.org/abs/2312.06635. Chunks of tokens and a running state between them, as in chunked.py, but the decays
belong to the queries and keys instead of their similarities:

    A_ij = Σ_e q_ie k_je exp(ℓ_{j+1,e} + … + ℓ_ie)        y = A v + Q S        S ← diag(w) S + Kᵀ v

A chunk is a tree. A query and a key are in two neighbouring blocks of s tokens for exactly one s, and there A is the
product of the queries, decayed since their block began, with the keys, decayed until theirs ends. Both times the whole
decay w of the other block are those of blocks of 2 s tokens; those of the chunk are Q and K. So all factors are at most
1 however strong the decays are, and one of −∞ needs no care.

The key sums z_t = α_t z_{t−1} + k_t are a scan of their own. Shapes: as in chunked.py, but the g queries that share a
key stand beside it, (B Cg f), so that blocks of tokens are blocks of rows. Chunks are filled up with zeros to a power
of two of tokens."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.backends.base import CausalCall, divide, infinite_if_none
from linattn.ops.backends.chunked import IDENTITY, Tile, arrange, cut, empty, scan
from linattn.ops.backends.workspace import Workspace
from linattn.ops.elementwise import ELEMENTWISE, Elementwise


def forward(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return outputs, the last state, and the states that enter each block, (i b f dv) and (i b 1 f), if `save`."""
    results, plan = empty(call, save), cut(call)
    y, S_end, z_end, S_saved, z_saved = results
    (call, (y,)), work = arrange(call, y), Workspace(call.S)
    S_end, z_end = S_end.flatten(0, -3), z_end.unsqueeze(-2).flatten(0, -3)
    for rows, tiles in plan:
        S, z = call.S[rows], call.z[rows]
        for i, tile in enumerate(tiles):
            if save:
                S_saved[i, rows], z_saved[i, rows] = S, z
            block, b = load(call, tile, work), len(S)
            sums = key_sums(block.k, block.alpha, z, tile)
            tree = Tree(block, asking(block, sums))
            S_ends = states(block, tree, S)
            part = torch.bmm(tree.A, block.v, out=work("y")).baddbmm_(tree.q, S_ends[:-b])
            write(tile, y, part if call.normalize != "output" else part.div_(denominators(block, sums)))
            S, z = S_ends[-b:].clone(), sums[-b:, -1:]
        S_end[rows], z_end[rows] = S, z
    return results


class Block(NamedTuple):
    """Features, values and decays of one block in the accumulation dtype: q (B Cg f), k and alpha (B C f), v (B C dv),
    and the mask (B C 1), True where a key is missing."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    missing: Tensor | None
    normalize: str | None
    nonnegative: bool
    tile: Tile
    work: Workspace


def load(call: CausalCall, tile: Tile, work: Workspace) -> Block:
    """Copy one block of a call, as `arrange` returns it, into the cache and apply φ."""
    phi, missing = ELEMENTWISE[call.feature_map], None
    assert call.log_decay is not None
    q, k = (read(tile, x, work, name, phi) for name, x in (("q", call.q), ("k", call.k)))
    v, alpha = (read(tile, x, work, name, IDENTITY) for name, x in (("v", call.v), ("alpha", call.log_decay)))
    if call.key_mask is not None:
        missing = filled_up(~tile.chunks(call.key_mask), tile).flatten(0, tile.lead)
        k.masked_fill_(missing, 0)
        v.masked_fill_(missing, 0)
        # what a masked token holds, NaN too, must not reach the gradients of the keys that its query sees
        per_query = per_token(q, k)
        per_query.masked_fill_(missing.unsqueeze(2) & ~per_query.sum(-1, keepdim=True).isfinite(), 0)
    return Block(q, k, v, alpha.exp_(), missing, call.normalize, phi.nonnegative, tile, work)


def read(tile: Tile, x: Tensor, work: Workspace, name: str, phi: Elementwise) -> Tensor:
    """Return φ of the chunks of x (*b *g n d) as (B Cg d), filled up with zeros."""
    return filled_up(work.features(name, beside_keys(tile, x), phi), tile).flatten(0, tile.lead).flatten(1, -2)


def beside_keys(tile: Tile, x: Tensor) -> Tensor:
    """View the chunks of x (*b *g n d) as (c *b C *g d)."""
    return tile.chunks(x).movedim(-2, tile.lead + 1)


def filled_length(tile: Tile) -> int:
    return 1 << (tile.chunk - 1).bit_length()


def filled_up(x: Tensor, tile: Tile) -> Tensor:
    """Fill up the tokens of (c *b C *g d) with zeros to a power of two."""
    missing = filled_length(tile) - tile.chunk
    return F.pad(x, (0, 0) * (x.ndim - tile.lead - 2) + (0, missing)) if missing else x


def write(tile: Tile, total: Tensor, part: Tensor) -> None:
    """Write (B Cg d) to where it belongs in (*b *g n d)."""
    target, part = beside_keys(tile, total), part.unflatten(1, (filled_length(tile), -1))
    target.copy_(part[:, : tile.chunk].reshape(target.shape))


def per_token(x: Tensor, k: Tensor) -> Tensor:
    """View (B Cg d) as (B C g d)."""
    return x.unflatten(1, (k.shape[1], -1))


def blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second of each two neighbouring blocks of `size` rows of (B C d), (m size d)."""
    first, second = x.unflatten(1, (-1, 2, size)).flatten(0, 1).unbind(1)
    return first, second


def key_sums(k: Tensor, alpha: Tensor, z: Tensor, tile: Tile) -> Tensor:
    """Return z_t = α_t z_{t−1} + k_t for all tokens (B C f), given that before the first (b 1 f)."""
    sums, since, size = k.clone(), alpha.clone(), 1
    while size < k.shape[1]:
        (sum_1, sum_2), (since_1, since_2) = blocks(sums, size), blocks(since, size)
        sum_2.addcmul_(since_2, sum_1[:, -1:])
        since_2.mul_(since_1[:, -1:])
        size *= 2
    for of_chunk, decay in zip(*(x.unflatten(0, (tile.number, -1)) for x in (sums, since)), strict=True):
        z = of_chunk.addcmul_(decay, z)[:, -1:]
    return sums


def asking(block: Block, sums: Tensor) -> Tensor:
    """Return the queries, over the key sums if `normalize` is "keys"."""
    if block.normalize != "keys":
        return block.q
    return divide(per_token(block.q, block.k), sums.unsqueeze(2)).flatten(1, 2)


def denominators(block: Block, sums: Tensor) -> Tensor:
    """q·z, (B Cg 1)"""
    d = (per_token(block.q, block.k) * sums.unsqueeze(2)).sum(-1, keepdim=True)
    return infinite_if_none(d.flatten(1, 2), nonnegative=block.nonnegative)


def products(x: Tensor, y: Tensor) -> Tensor:
    """x yᵀ of (m r f) and (m s f)."""
    # products of small matrices take longer than elementwise ones
    return torch.bmm(x, y.mT) if y.shape[1] > 2 else (x.unsqueeze(2) * y.unsqueeze(1)).sum(-1)


def over_keys(g: Tensor, k: Tensor) -> Tensor:
    """g k of (m r s) and (m s f)."""
    return torch.bmm(g, k) if k.shape[1] > 2 else (g.unsqueeze(-1) * k.unsqueeze(1)).sum(2)


class Level(NamedTuple):
    """Queries (m sg f) and keys (m s f) that meet at the borders of blocks of a size; w of both blocks (m 2 f)."""

    q: Tensor
    k: Tensor
    w: Tensor


class Tree:
    """A (B Cg C), queries (B Cg f) decayed since their chunk began, keys (B C f) until it ends, and w (B f)."""

    def __init__(self, block: Block, asking: Tensor, *, keep: bool = False):
        (count, C, _), self.group = block.k.shape, asking.shape[1] // block.k.shape[1]
        self.block, self.asking, self.levels = block, asking, list[Level]()
        self.A = block.work("A", (count, C * self.group, C)).zero_()
        own(self.A).copy_((per_token(asking, block.k) * block.k.unsqueeze(2)).sum(-1))
        self.q, self.k = (per_token(asking, block.k) * block.alpha.unsqueeze(2)).flatten(1, 2), block.k.clone()
        w, size = block.alpha.flatten(0, 1), 1
        while size < C:
            w = w.unflatten(0, (-1, 2))
            later, earlier = blocks(self.q, size * self.group)[1], blocks(self.k, size)[0]
            corner = corners(self.A, size)
            corner.copy_(products(later, earlier).view_as(corner))
            if keep:
                self.levels.append(Level(later.clone(), earlier.clone(), w))
            later.mul_(w[:, :1])
            earlier.mul_(w[:, 1:])
            w, size = w[:, 0] * w[:, 1], 2 * size
        self.w = w

    def gradient(self, G: Tensor, dq: Tensor, dk: Tensor, dl: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and logarithms of decays, from those of A, queries, keys and log w."""
        for later, earlier, w in reversed(self.levels):
            size = earlier.shape[1]
            dlater, dearlier = blocks(dq, size * self.group)[1], blocks(dk, size)[0]
            dlater.mul_(w[:, :1])
            dearlier.mul_(w[:, 1:])
            crossing = (later * dlater).sum(1), (earlier * dearlier).sum(1)
            dl = torch.stack([dl + x for x in crossing], 1).flatten(0, 1)
            g = corners(G, size).flatten(0, 1)
            dlater.add_(over_keys(g, earlier))
            dearlier.add_(over_keys(g.mT, later))
        asking, dq, k, same = per_token(self.asking, dk), per_token(dq, dk), self.block.k, own(G).unsqueeze(-1)
        dq.mul_(self.block.alpha.unsqueeze(2))
        dl = dl.view_as(dk) + (asking * dq).sum(2)
        return dq.addcmul_(same, k.unsqueeze(2)).flatten(1, 2), dk.add_((same * asking).sum(2)), dl


def corners(A: Tensor, size: int) -> Tensor:
    """View the parts of (B Cg C) where a second block's queries meet the first's keys, (B m sg s)."""
    count, group = A.shape[2] // (2 * size), A.shape[1] // A.shape[2]
    parts = A.unflatten(2, (count, 2, size)).unflatten(1, (count, 2, size * group))
    return parts[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


def own(A: Tensor) -> Tensor:
    """View the parts of (B Cg C) where queries meet their own key, (B C g)."""
    return A.unflatten(1, (A.shape[2], -1)).diagonal(dim1=1, dim2=3).mT


def states(block: Block, tree: Tree, S: Tensor) -> Tensor:
    """Return the states at the ends of all chunks, (cb+b f dv), from those that enter, (b f dv)."""
    ends = block.work("S", (len(block.k) + len(S), *S.shape[1:]))
    ends[: len(S)] = S
    ends[len(S) :].baddbmm_(tree.k.mT, block.v, beta=0)
    scan(ends, block.tile, over(block, tree))
    return ends


def over(block: Block, tree: Tree) -> Tensor:
    """w as (c b f 1)"""
    return tree.w.unsqueeze(-1).unflatten(0, (block.tile.number, -1))
