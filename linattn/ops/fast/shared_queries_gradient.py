"""The gradient for heads that share queries and keys, from the last block to the first. With shapes and letters as in
shared_queries.py, V = [v, 1], the gradients dN of [numerator, denominator] and dS' of the state that leaves a chunk,

    G_h = D_h ∘ (dN_h V_hᵀ)        dq = Σ_h G_h k + r_h dN_h S_hᵀ        dk = Σ_h G_hᵀ q + w_h V_h dS'_hᵀ
    dV_h = A_hᵀ dN_h + w_h k dS'_h                                       dS_h = a_h dS'_h + qᵀ (r_h dN_h)

The inputs and one state per block are saved; the rest is recomputed."""

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.fast.blocks import Workspace, empty_like, gradient_like, scan
from linattn.ops.fast.decay_weights import sum_crossing
from linattn.ops.fast.linear import sizes
from linattn.ops.fast.shared_queries import Block, arrange, forward, heads_view, write_states
from linattn.ops.numerics import decay_gradient, summed
from linattn.ops.operator import Tensors


def gradient(call: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    """Return gradients of q, k, v, S, z, the decays and the mask (None), from those of y, S and z in `grads`."""
    (S_saved,), (dy, dS, dz) = saved, grads
    assert dy is not None and dS is not None and dz is not None and call.log_decay is not None
    if S_saved is None or S_saved.shape[0] == 0:
        S_saved = forward(call, save=True)[3]
    lead, views, work, phi = call.S.shape[:-2], arrange(call), Workspace(call.S), ELEMENTWISE[call.feature_map]
    dq, dk = empty_like(call.q, call.q.shape), gradient_like(call.k, views.k.shape)
    dv = gradient_like(call.v, (*lead, *call.v.shape[-2:]))
    dlog_decay = call.S.new_empty(*lead, call.q.shape[-2], 1)
    dy, dv_view, dlog_view = (heads_view(x, call) for x in (dy, dv, dlog_decay))
    dstates = arrange(call._replace(S=dS, z=dz)).S.flatten(0, -3).clone()
    for place in reversed(sizes(views).places(views.S.shape[:-2], views.q.shape[-2])):
        rows, block = place.states, Block(views, place, work)
        dN = block.load_values("dN", dy, 0)
        of_q, of_k, of_v, of_decay, dstates[rows] = _block_gradient(
            block, S_saved[place.position, rows], dN, dstates[rows]
        )
        place.write(dq, work.map_gradient(of_q, block.q, phi))
        place.write(dk, work.map_gradient(of_k, block.k, phi))
        place.write(dv_view, of_v)
        place.write(dlog_view, of_decay)
    dS, dz = (x.new_empty(x.shape) for x in (call.S, call.z))
    write_states(dstates, call, dS, dz)
    dlog_decay = decay_gradient(dlog_decay.squeeze(-1), call.log_decay)
    return dq, summed(dk, call.k), summed(dv, call.v), dS, dz, dlog_decay, None


def _block_gradient(block: Block, S_start: Tensor, dN: Tensor, dS_end: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values, decays and `S_start`, the state before the block (b f He). `dN`
    (B H C e) comes in as [dy, 0] and becomes dN in place; `dS_end` is the gradient of the state after the block."""
    b, work = len(S_start), block.work
    S = block.states(S_start)[:-b]
    reads = block.reads(S)
    if block.normalize:
        _quotient_gradient(dN, *block.outputs(reads))
    dreads = block.by_token(dN, block.r, "dreads")
    dS_ends = work("dS", (len(block.q) + b, *S.shape[1:]))
    dS_ends[-b:] = dS_end
    dS_ends[:-b].baddbmm_(block.q.mT, dreads, beta=0)
    scan(dS_ends, block.place, block.chunk_decay, reverse=True)
    dS, v_until_end = dS_ends[b:], block.v_until_end
    dv_until_end = block.by_head(torch.bmm(block.k, dS, out=work("dv_until_end")))
    G = torch.bmm(dN.flatten(0, 1), block.v.flatten(0, 1).mT, out=work("G")).view_as(block.A).mul_(block.D)
    dproducts = G.sum(1)
    dq = torch.bmm(dreads, S.mT, out=work("dq")).baddbmm_(dproducts, block.k)
    dk = torch.bmm(v_until_end, dS.mT, out=work("dk")).baddbmm_(dproducts.mT, block.q)
    dv = torch.bmm(block.A.flatten(0, 1).mT, dN.flatten(0, 1), out=work("dv")).view_as(dN)
    dv.addcmul_(dv_until_end, block.w)
    pairs, of_reads = G.mul_(block.products.unsqueeze(1)), (reads * block.by_head(dreads)).sum(-1, keepdim=True)
    of_values = (block.by_head(v_until_end) * dv_until_end).sum(-1, keepdim=True)
    dlog_decay = sum_crossing(pairs.flatten(0, 1), of_reads.flatten(0, 1), of_values.flatten(0, 1))
    of_states = (S * dS).sum(1).mul_(block.chunk_decay.flatten(0, 2)).unflatten(-1, dN.shape[1::2]).sum(-1)
    dlog_decay += of_states.view(-1, 1, 1)
    if block.missing is not None:
        dk.masked_fill_(block.missing, 0)
        dv.masked_fill_(block.missing.unsqueeze(1), 0)
    return dq, dk, dv[..., :-1], dlog_decay, dS_ends[:b]


def _quotient_gradient(dN: Tensor, N: Tensor, d: Tensor | None) -> None:
    """Turn `dN` (B H C e) in place from dy, the gradient of N / d, into that of [N, d], [dy / d, −dy·N / d²]."""
    assert d is not None
    dN.div_(d)
    dN[..., -1:] = (dN[..., :-1] * N).sum(-1, keepdim=True).div_(d).neg_()
