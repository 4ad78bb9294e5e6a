"""The gradient of the chunked form, which is of the same kind in reverse (Katharopoulos et al.,
https://arxiv.org/abs/2006.16236, eq. 13–15).

What is saved for it is the inputs and one state for every segment of tokens; the rest is computed again, y included:
what rounding to half precision takes off y would be most of dN·(v − y) where values have a mean."""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.backends.base import CausalCall, decay_gradient, divide, summed
from linattn.ops.backends.chunked import (
    IDENTITY,
    Block,
    Queries,
    arrange,
    cut,
    decayed,
    forward,
    load,
    over_key_sums,
    queries,
    scan,
    states,
    weigh,
    weights,
)
from linattn.ops.backends.operator import Tensors
from linattn.ops.backends.workspace import Workspace, empty_like
from linattn.ops.elementwise import ELEMENTWISE


def gradient(call: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    """Return gradients of the call's seven tensors, in one pass over the blocks from the last to the first."""
    (S_saved, z_saved), (dy, dS, dz) = saved, grads
    assert dy is not None and dS is not None and dz is not None
    if S_saved is None or z_saved is None or S_saved.shape[0] == 0:
        S_saved, z_saved = forward(call, save=True)[3:]
    dq, phi, work = empty_like(call.q, call.q.shape), ELEMENTWISE[call.feature_map], Workspace(call.S)
    given, (dq_view, dy) = arrange(call, dq, dy)
    dk, dv = (empty_like(x, x.shape) for x in (given.k, given.v))
    dlog_decay = None if given.log_decay is None else call.S.new_empty(given.log_decay.shape)
    dS, dz = dS.flatten(0, -3).clone(), dz.unsqueeze(-2).flatten(0, -3).clone()
    for rows, tiles in cut(call):
        for i, tile in reversed(list(enumerate(tiles))):
            block, b = load(given, tile, work), len(dS[rows])
            S_in, z_in = (x[:-b] for x in states(block, S_saved[i, rows], z_saved[i, rows]))
            queries = _of_queries(block, S_in, z_in, tile.flat(work.features("y", tile.chunks(dy), IDENTITY)))
            tile.write(dq_view, work.through_map(queries.dq, block.q, phi))
            dS_ends, dz_ends = _of_states(block, queries, dS[rows], dz[rows])
            of_k, of_v, of_decay = _of_keys(block, queries, (S_in, z_in), (dS_ends[b:], dz_ends[b:]))
            tile.write(dk, work.through_map(of_k, block.k, phi))
            tile.write(dv, of_v)
            if dlog_decay is not None and of_decay is not None:
                tile.write(dlog_decay, of_decay)
            dS[rows], dz[rows] = dS_ends[:b], dz_ends[:b]
    if dlog_decay is not None and call.log_decay is not None:
        dlog_decay = decay_gradient(dlog_decay.squeeze(-1), call.log_decay)
    return dq, summed(dk, call.k), summed(dv, call.v), dS.view_as(call.S), dz.view_as(call.z), dlog_decay, None


class _Queries(NamedTuple):
    """The gradient of a block's queries, and what it has in common with that of the keys."""

    dq: Tensor
    queries: Queries
    dN: Tensor  # gradient of the numerator, (cb gC dv)
    G: Tensor  # gradient of q kᵀ, (cb gC C)
    dz: Tensor | None  # gradient of the z that enters each chunk, (cb 1 f)
    dkey_sums: Tensor | None  # gradient of the key sums, (cb C f)
    crossing: Tensor | None  # gradient of the decays through this chunk's queries, (cb C 1)


def _of_queries(block: Block, S_in: Tensor, z_in: Tensor, dN: Tensor) -> _Queries:
    """Start from the gradient of the outputs, in place. With y = N / d, dN = dy / d and dd = −dN·y = −dN·N / d."""
    work, asked = block.work, queries(block, z_in)
    q, q_in, A, d, key_sums = asked
    dz, dkey_sums, crossing = None, None, None
    if d is not None:
        dN.div_(d)
    dq, G = torch.bmm(dN, S_in.mT, out=work("dq")), torch.bmm(dN, block.v.mT, out=work("G"))
    if d is not None:
        # dN·N from the products at hand: y itself was rounded
        dd = torch.mul(q_in, dq, out=work("scratch")).sum(-1, keepdim=True)
        dd.add_(torch.mul(A, G, out=work("scratch")).sum(-1, keepdim=True)).div_(d).neg_()
        dq.addcmul_(dd, z_in)
        G.add_(dd)
        dz = torch.mul(q_in, dd, out=work("scratch")).sum(1, keepdim=True)
    if block.decay.over is not None:
        crossing = _crossing(A * G, q_in * dq, block)
    dq = decayed(dq, block.decay.since).baddbmm_(weigh(G, block), block.k)
    if key_sums is not None:
        dkey_sums = -divide((dq * q).unflatten(1, (-1, block.tile.chunk)).sum(1), key_sums)
        of_z = decayed(dkey_sums, block.decay.since)
        dz = of_z.sum(1, keepdim=True)
        dq = over_key_sums(dq, key_sums)
        if crossing is not None:
            crossing += _crossing(weights(block) * (dkey_sums @ block.k.mT), of_z * z_in, block)
    # a tensor that is kept would hold a place in the cache
    return _Queries(dq, asked._replace(d=None, key_sums=None), dN, G, dz, dkey_sums, crossing)


def _crossing(AG: Tensor, Q: Tensor, block: Block) -> Tensor:
    """Return the gradient of each token's decay through the queries of its chunk, (cb C 1)."""
    return sum_crossing(*(x.unflatten(1, (-1, block.tile.chunk)).sum(1) for x in (AG, Q.sum(-1, keepdim=True))))


def sum_crossing(pairs: Tensor, Q: Tensor) -> Tensor:
    """Sum the `pairs` (cb C C) that cross each token, i ≥ t > j, and Q_i (cb C 1) over i ≥ t, for the state before the
    chunk. A difference of sums over all pairs would leave their rounding where decays are strong."""
    before = Q + pairs @ pairs.new_ones(pairs.shape[1:]).triu(1)
    return before.tril().sum(1).unsqueeze(-1)


def _of_states(block: Block, past: _Queries, dS: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states at the ends of all chunks, (cb+b f dv) and (cb+b 1 f), from those after the
    block."""
    b, work = len(dS), block.work
    dS_ends, dz_ends = (work(name, (len(block.k) + b, *x.shape[1:])) for name, x in (("dS", dS), ("dz", dz)))
    dS_ends[-b:], dz_ends[-b:] = dS, dz
    dS_ends[:-b].baddbmm_(past.queries.q_in.mT, past.dN, beta=0)
    dz_ends[:-b] = 0 if past.dz is None else past.dz
    scan(dS_ends, block.tile, block.decay.over, reverse=True)
    scan(dz_ends, block.tile, block.decay.over, reverse=True)
    return dS_ends, dz_ends


def _of_keys(
    block: Block, past: _Queries, entering: tuple[Tensor, Tensor], leaving: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of keys, values and decays, (cb C d), given the states that enter each chunk and the
    gradients of those that leave it."""
    (k, v), (dS, dz), work, w, dlog_decay = (block.k, block.v), leaving, block.work, block.decay.until, None
    dv, dk = torch.bmm(decayed(k, w), dS, out=work("dv")), torch.bmm(decayed(v, w), dS.mT, out=work("dk"))
    dk.add_(decayed(dz.expand_as(k), w))
    if block.decay.over is not None and past.crossing is not None:
        later = torch.mul(k, dk, out=work("scratch")).sum(-1, keepdim=True)
        over = sum((x * dx).sum((1, 2), keepdim=True) for x, dx in zip(entering, leaving, strict=True))
        dlog_decay = past.crossing + (later.cumsum(1) - later) + block.decay.over.flatten(0, 1) * over
    dv.baddbmm_(past.queries.A.mT, past.dN)
    dk.baddbmm_(past.G.mT, past.queries.q)
    if past.dkey_sums is not None:
        dk.baddbmm_(weights(block).mT, past.dkey_sums)
    if block.missing is not None:
        dk.masked_fill_(block.missing, 0)
        dv.masked_fill_(block.missing, 0)
    return dk, dv, dlog_decay
