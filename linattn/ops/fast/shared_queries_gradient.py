"""The gradient for heads that share queries and keys, from the last block to the first. What is saved for it is the
inputs and one state per block; the rest is computed again."""

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.fast.blocks import Workspace, empty_like
from linattn.ops.fast.decays import sum_crossing
from linattn.ops.fast.linear import scan, sizes
from linattn.ops.fast.shared_queries import Block, arrange, beside_heads, denominators, forward, separate
from linattn.ops.numerics import decay_gradient, summed
from linattn.ops.operator import Tensors


def gradient(call: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    """Return gradients of the call's seven tensors."""
    (S_saved,), (dy, dS, dz) = saved, grads
    assert dy is not None and dS is not None and dz is not None and call.log_decay is not None
    if S_saved is None or S_saved.shape[0] == 0:
        S_saved = forward(call, save=True)[3]
    lead, given, work, phi = call.S.shape[:-2], arrange(call), Workspace(call.S), ELEMENTWISE[call.feature_map]
    dq, dk = empty_like(call.q, call.q.shape), empty_like(call.k, given.k.shape)
    dv = empty_like(call.v, (*lead, *call.v.shape[-2:]))
    dlog_decay = call.S.new_empty(*lead, call.q.shape[-2], 1)
    upstream, dv_view, dlog_view = (beside_heads(x, call) for x in (dy, dv, dlog_decay))
    leaving = arrange(call._replace(S=dS, z=dz)).S.flatten(0, -3).clone()
    for rows, places in sizes(given).cut(given.S.shape[:-2], given.q.shape[-2]):
        for i, place in reversed(list(enumerate(places))):
            block = Block(given, place, work)
            dN = block.values("dN", upstream, 0)
            of_q, of_k, of_v, of_decay, leaving[rows] = _of_block(block, S_saved[i, rows], dN, leaving[rows], call)
            place.write(dq, work.through_map(of_q, block.q, phi))
            place.write(dk, work.through_map(of_k, block.k, phi))
            place.write(dv_view, of_v)
            place.write(dlog_view, of_decay)
    dS, dz = (x.new_empty(x.shape) for x in (call.S, call.z))
    separate(leaving, call, dS, dz)
    dlog_decay = decay_gradient(dlog_decay.squeeze(-1), call.log_decay)
    return dq, summed(dk, call.k), summed(dv, call.v), dS, dz, dlog_decay, None


def _of_block(block: Block, S: Tensor, dN: Tensor, dS: Tensor, call: CausalCall) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values, decays and the state that enters. Given are that state, the
    gradients of the outputs, which are overwritten, and of the state that leaves."""
    b, work, weights = len(S), block.work, block.weights
    S_in = block.states(S)[:-b]
    read = block.read(S_in)
    if call.normalize:
        _divide(dN, block.outputs(read), call)
    dread = block.by_token(dN, weights.since, "dread")
    ends = work("dS", (len(block.q) + b, *S.shape[1:]))
    ends[-b:] = dS
    ends[:-b].baddbmm_(block.q.mT, dread, beta=0)
    scan(ends, block.place, weights.over, reverse=True)
    dS_out = ends[b:]
    written, dwritten = block.written, block.by_head(torch.bmm(block.k, dS_out, out=work("dwritten")))
    G = torch.bmm(dN.flatten(0, 1), block.v.flatten(0, 1).mT, out=work("G")).view_as(block.A).mul_(weights.inside)
    dproducts = G.sum(1)
    dq = torch.bmm(dread, S_in.mT, out=work("dq")).baddbmm_(dproducts, block.k)
    dk = torch.bmm(written, dS_out.mT, out=work("dk")).baddbmm_(dproducts.mT, block.q)
    dv = torch.bmm(block.A.flatten(0, 1).mT, dN.flatten(0, 1), out=work("dv")).view_as(dN)
    dv.addcmul_(dwritten, weights.until)
    pairs, reads = G.mul_(block.products.unsqueeze(1)), (read * block.by_head(dread)).sum(-1, keepdim=True)
    later = (block.by_head(written) * dwritten).sum(-1, keepdim=True)
    dlog_decay = sum_crossing(pairs.flatten(0, 1), reads.flatten(0, 1), later.flatten(0, 1))
    over = (S_in * dS_out).sum(1).mul_(weights.over.flatten(0, 2)).unflatten(-1, dN.shape[1::2]).sum(-1)
    dlog_decay += over.view(-1, 1, 1)
    if block.missing is not None:
        dk.masked_fill_(block.missing, 0)
        dv.masked_fill_(block.missing.unsqueeze(1), 0)
    return dq, dk, dv[..., :-1], dlog_decay, ends[:b]


def _divide(dN: Tensor, y: Tensor, call: CausalCall) -> None:
    """Turn the gradients of outputs N / d into those of N and d: dN = dy / d and dd = −dN·N / d."""
    d = denominators(y, call)
    assert d is not None
    dN.div_(d)
    dN[..., -1:] = (dN[..., :-1] * y[..., :-1]).sum(-1, keepdim=True).div_(d).neg_()
