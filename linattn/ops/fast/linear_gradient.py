"""The gradient of the chunked form, which is of the same kind in reverse (Katharopoulos et al.,
https://arxiv.org/abs/2006.16236, eq. 13–15).

What is saved for it is the inputs and one state for every segment of tokens; the rest is computed again, y included:
what rounding to half precision takes off y would be most of dN·(v − y) where values have a mean."""

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.fast.blocks import Workspace, empty_like
from linattn.ops.fast.linear import Block, arrange, forward, scan, sizes
from linattn.ops.numerics import decay_gradient, divide, summed
from linattn.ops.operator import Tensors


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
    for rows, places in sizes(call).cut(call.S.shape[:-2], call.q.shape[-2]):
        for i, place in reversed(list(enumerate(places))):
            entering, leaving = (S_saved[i, rows], z_saved[i, rows]), (dS[rows], dz[rows])
            block = Block(given, place, entering[1], work)
            upstream = place.load(dy, "dN", work)
            (of_q, of_k, of_v, of_decay), (dS[rows], dz[rows]) = _of_block(block, entering, upstream, leaving)
            place.write(dq_view, work.through_map(of_q, block.features, phi))
            place.write(dk, work.through_map(of_k, block.k, phi))
            place.write(dv, of_v)
            if dlog_decay is not None and of_decay is not None:
                place.write(dlog_decay, of_decay)
    if dlog_decay is not None and call.log_decay is not None:
        per_channel = call.log_decay.ndim == call.q.ndim
        dlog_decay = decay_gradient(dlog_decay if per_channel else dlog_decay.squeeze(-1), call.log_decay)
    return dq, summed(dk, call.k), summed(dv, call.v), dS.view_as(call.S), dz.view_as(call.z), dlog_decay, None


Pair = tuple[Tensor, Tensor]


def _of_block(
    block: Block, entering: Pair, dN: Tensor, leaving: Pair
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], Pair]:
    """Return the gradients of queries, keys, values and decays, and of the state that enters. Given are that state, the
    gradients of the outputs, which are overwritten, and of the state that leaves."""
    work, b, (S_ends, z_ends, A, d) = block.work, len(leaving[0]), block.run(*entering)
    S_in, z_in = S_ends[:-b], z_ends[:-b]
    if d is not None:
        dN.div_(d)
    dq, G = torch.bmm(dN, S_in.mT, out=work("dq")), torch.bmm(dN, block.v.mT, out=work("G"))
    dz_read = None if d is None else _of_denominators(block, A, z_in, d, dq, G)
    dS_ends, dz_ends = _of_states(block, dN, dz_read, leaving)
    dS_out, dz_out = dS_ends[b:], dz_ends[b:]
    dv = torch.bmm(block.k_out, dS_out, out=work("dv")).baddbmm_(A.mT, dN)
    dk = torch.bmm(block.v, dS_out.mT, out=work("dk")).add_(dz_out)
    dover = None
    if block.inside.over is not None:
        dover = torch.mul(S_in, dS_out, out=work("scratch")).sum(-1, keepdim=True).add_((z_in * dz_out).mT)
    dq = dq.view(block.q.shape)
    dlog_decay, dz = block.inside.gradient(G.view(block.inside.products.shape), dq, dk, dover), dz_ends[:b]
    if block.sums is not None:
        sums, dq_divided = block.sums, (dq * block.q).sum(1)
        dq = divide(dq, sums.z.unsqueeze(1))
        added, crossing, first = sums.gradient(-divide(dq_divided, sums.z))
        dk, dz = dk.add_(added), dz + first
        dlog_decay = None if dlog_decay is None else dlog_decay + crossing.sum_to_size(dlog_decay.shape)
    if block.missing is not None:
        dk.masked_fill_(block.missing, 0)
        dv.masked_fill_(block.missing, 0)
    return (dq.flatten(1, 2), dk, dv, dlog_decay), (dS_ends[:b], dz)


def _of_denominators(block: Block, A: Tensor, z_in: Tensor, d: Tensor, dq: Tensor, G: Tensor) -> Tensor:
    """Add to the gradients of decayed queries and of A those through the denominators: with y = N / d, dN = dy / d and
    dd = −dN·y = −dN·N / d. Return the gradient of the z that enters each chunk."""
    work = block.work
    # dN·N from the products at hand: y itself was rounded
    dd = torch.mul(block.q_in, dq, out=work("scratch")).sum(-1, keepdim=True)
    dd.add_(torch.mul(A, G, out=work("scratch")).sum(-1, keepdim=True)).div_(d).neg_()
    dq.addcmul_(dd, z_in)
    G.add_(dd)
    return torch.mul(block.q_in, dd, out=work("scratch")).sum(1, keepdim=True)


def _of_states(block: Block, dN: Tensor, dz_read: Tensor | None, leaving: Pair) -> Pair:
    """Return the gradients of the states at the ends of all chunks, (cb+b f dv) and (cb+b 1 f), from those after the
    block."""
    b, named = len(leaving[0]), zip(("dS", "dz"), leaving, strict=True)
    dS_ends, dz_ends = (block.work(name, (len(block.k) + b, *x.shape[1:])) for name, x in named)
    dS_ends[-b:], dz_ends[-b:] = leaving
    dS_ends[:-b].baddbmm_(block.q_in.mT, dN, beta=0)
    dz_ends[:-b] = 0 if dz_read is None else dz_read
    for ends, over in zip((dS_ends, dz_ends), block.overs, strict=True):
        scan(ends, block.place, over, reverse=True)
    return dS_ends, dz_ends
