"""The gradient of the chunked form of causal linear attention, a chunked form in reverse. Katharopoulos et al.,
https://arxiv.org/abs/2006.16236, eq. 13–15.

With shapes and letters as in linear.py, N = A v + r φ(q) S and the denominators d, outputs are y = N / d, so that dN =
dy / d and dd = −dN·N / d. In a chunk with the gradients dS' and dz' of the states that leave it, for G = D ∘ (dN vᵀ +
dd 1ᵀ),

    dφ(q) = G φ(k) + r (dN Sᵀ + dd zᵀ)        dφ(k) = Gᵀ φ(q) + w (v dS'ᵀ + 1 dz'ᵀ)        dv = Aᵀ dN + w φ(k) dS'
    dS = a dS' + (r φ(q))ᵀ dN                 dz = a dz' + (r φ(q))ᵀ dd                    a scan in reverse

The inputs and one state per block are saved; the rest is recomputed. So is N: the returned y was rounded, perhaps to
half precision. Where values have a mean far from zero, dN·v + dd = dN·(v − y) would be mostly the error of that
rounding."""

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.fast.blocks import Workspace, empty_like, gradient_like, scan
from linattn.ops.fast.linear import Block, Pair, arrange, forward, sizes
from linattn.ops.numerics import decay_gradient, divide, summed
from linattn.ops.operator import Tensors


def gradient(call: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    """Return gradients of q, k, v, S, z, the decays and the mask (None), from those of y, S and z in `grads`."""
    (S_saved, z_saved), (dy, dS, dz) = saved, grads
    assert dy is not None and dS is not None and dz is not None
    if S_saved is None or z_saved is None or S_saved.shape[0] == 0:
        S_saved, z_saved = forward(call, save=True)[3:]
    dq, phi, work = empty_like(call.q, call.q.shape), ELEMENTWISE[call.feature_map], Workspace(call.S)
    views, (dq_view, dy) = arrange(call, dq, dy)
    dk, dv = gradient_like(call.k, views.k.shape), gradient_like(call.v, views.v.shape)
    dlog_decay = None if views.log_decay is None else call.S.new_empty(views.log_decay.shape)
    dS, dz = dS.flatten(0, -3).clone(), dz.unsqueeze(-2).flatten(0, -3).clone()
    for place in reversed(sizes(call).places(call.S.shape[:-2], call.q.shape[-2])):
        rows, start = place.states, (S_saved[place.position, place.states], z_saved[place.position, place.states])
        block = Block(views, place, start[1], work)
        of_block, (dS[rows], dz[rows]) = _block_gradient(block, start, place.load(dy, "dN", work), (dS[rows], dz[rows]))
        of_q, of_k, of_v, of_decay = of_block
        place.write(dq_view, work.map_gradient(of_q, block.features, phi))
        place.write(dk, work.map_gradient(of_k, block.k, phi))
        place.write(dv, of_v)
        if dlog_decay is not None and of_decay is not None:
            place.write(dlog_decay, of_decay)
    if dlog_decay is not None and call.log_decay is not None:
        per_channel = call.log_decay.ndim == call.q.ndim
        dlog_decay = decay_gradient(dlog_decay if per_channel else dlog_decay.squeeze(-1), call.log_decay)
    return dq, summed(dk, call.k), summed(dv, call.v), dS.view_as(call.S), dz.view_as(call.z), dlog_decay, None


def _block_gradient(
    block: Block, start: Pair, dN: Tensor, dend: Pair
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], Pair]:
    """Return the gradients of queries, keys, values and decays, and that of `start`, the state (S, z) before the block.
    `dN` (B gC dv) comes in as dy and is divided by d in place; `dend` is the gradient of the state after the block."""
    work, b, (S_ends, z_ends) = block.work, len(dend[0]), block.states(*start)
    S, z = S_ends[:-b], z_ends[:-b]
    A, d = block.similarities(z)
    if d is not None:
        dN.div_(d)
    dq, G = torch.bmm(dN, S.mT, out=work("dq")), torch.bmm(dN, block.v.mT, out=work("G"))
    dz_reads = None if d is None else _denominator_gradient(block, A, z, d, dq, G)
    dS_ends, dz_ends = _state_gradients(block, dN, dz_reads, dend)
    dS, dz = dS_ends[b:], dz_ends[b:]
    dv = torch.bmm(block.k_until_end, dS, out=work("dv")).baddbmm_(A.mT, dN)
    dk = torch.bmm(block.v, dS.mT, out=work("dk")).add_(dz)
    da = None
    if block.decays.chunk_decay is not None:
        da = torch.mul(S, dS, out=work("scratch")).sum(-1, keepdim=True).add_((z * dz).mT)
    dq, per_query = dq.view(block.q.shape), (*block.q.shape[:-1], A.shape[-1])
    dlog_decay, dz_start = block.decays.gradient(A.view(per_query), G.view(per_query), dq, dk, da), dz_ends[:b]
    if block.sums is not None:
        sums, dq_quotient = block.sums, (dq * block.q).sum(1)
        dq = divide(dq, sums.z.unsqueeze(1))
        dk_sums, dlog_sums, dz_sums = sums.gradient(-divide(dq_quotient, sums.z))
        dk, dz_start = dk.add_(dk_sums), dz_start + dz_sums
        dlog_decay = None if dlog_decay is None else dlog_decay + dlog_sums.sum_to_size(dlog_decay.shape)
    if block.missing is not None:
        dk.masked_fill_(block.missing, 0)
        dv.masked_fill_(block.missing, 0)
    return (dq.flatten(1, 2), dk, dv, dlog_decay), (dS_ends[:b], dz_start)


def _denominator_gradient(block: Block, A: Tensor, z: Tensor, d: Tensor, dq: Tensor, G: Tensor) -> Tensor:
    """Compute dd from `dq` = dN Sᵀ and `G` = dN vᵀ, and add what comes through the denominators d: dd zᵀ to `dq` and
    dd 1ᵀ to `G`. Return the gradient of z, the sums before each chunk (B 1 f), through d: (r φ(q))ᵀ dd."""
    work = block.work
    # dN·N from the products in memory: y itself was rounded
    dd = torch.mul(block.q_since_start, dq, out=work("scratch")).sum(-1, keepdim=True)
    dd.add_(torch.mul(A, G, out=work("scratch")).sum(-1, keepdim=True)).div_(d).neg_()
    dq.addcmul_(dd, z)
    G.add_(dd)
    return torch.mul(block.q_since_start, dd, out=work("scratch")).sum(1, keepdim=True)


def _state_gradients(block: Block, dN: Tensor, dz_reads: Tensor | None, dend: Pair) -> Pair:
    """Return the gradients of the states at the c + 1 ends of chunks, S (cb+b f dv) and z (cb+b 1 f), from `dend`, the
    gradient of the last state. `dz_reads` (B 1 f) is what z gets from the denominators of its chunk, or None."""
    b, names = len(dend[0]), zip(("dS", "dz"), dend, strict=True)
    dS_ends, dz_ends = (block.work(name, (len(block.k) + b, *x.shape[1:])) for name, x in names)
    dS_ends[-b:], dz_ends[-b:] = dend
    dS_ends[:-b].baddbmm_(block.q_since_start.mT, dN, beta=0)
    dz_ends[:-b] = 0 if dz_reads is None else dz_reads
    for ends, decay in zip((dS_ends, dz_ends), block.chunk_decays, strict=True):
        scan(ends, block.place, decay, reverse=True)
    return dS_ends, dz_ends
