"""The gradient of the chunked delta rule, from the last block to the first. With shapes, P, A and errors E as in
delta.py, the gradients dY of the outputs, dS' of the state that leaves a chunk, and X = dE,

    X = (1 + Aᵀ)⁻¹ (Pᵀ dY + (w β k) dS')                 errors, in reverse
    dS = a dS' + (r q)ᵀ dY − (r k)ᵀ X                    inter-chunk, in reverse
    dV = X        d[P, A] = [dY, −X] Eᵀ        d[r q, r k] = [dY, −X] Sᵀ        d(w β k) = E dS'ᵀ

The inputs, E, the matrices of each chunk and one state per block are saved; the rest is recomputed."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from linattn.ops.calls import DeltaCall
from linattn.ops.fast.blocks import Workspace, empty_like, gradient_like
from linattn.ops.fast.delta import Block, arrange, forward, saved_view, sizes
from linattn.ops.numerics import decay_gradient, summed
from linattn.ops.operator import Tensors


def gradient(call: DeltaCall, saved: Tensors, grads: Tensors) -> Tensors:
    """Return gradients of q, k, v, β, S, the decays and the removal keys, from what `forward` saved and `grads`, those
    of y and S."""
    (S_saved, E_saved, matrices), (dy, dS) = saved, grads
    assert dy is not None and dS is not None
    if S_saved is None or E_saved is None or matrices is None or S_saved.shape[0] == 0:
        S_saved, E_saved, matrices = forward(call, True)[2:]
    dq, work = empty_like(call.q, call.q.shape), Workspace(call.S)
    views, (dq_view, dy) = arrange(call, dq, dy)
    dk, dv, dbeta = (gradient_like(x, view.shape) for x, view in zip(call[1:4], views[1:4], strict=True))
    dlog_decay = None if views.log_decay is None else empty_like(dS, views.log_decay.shape)
    dremoval = None if call.removal_key is None else gradient_like(call.removal_key, dk.shape)
    totals, dS = (dq_view, dk, dv, dbeta, dlog_decay, dremoval), dS.reshape(views.S.shape).clone()
    for place in reversed(sizes(call).places(call.S.shape[:-2], call.q.shape[-2])):
        rows, block = place.states, Block(views, place, work, saved_view(matrices, place))
        E = saved_view(E_saved, place).flatten(0, 1)
        dS[rows] = _block_gradient(block, E, S_saved[place.position, rows], dy, dS[rows], totals)
    if call.log_decay is not None and dlog_decay is not None:
        dlog_decay = decay_gradient(dlog_decay, call.log_decay)
    dk, dv, dbeta = (summed(g, x) for g, x in zip((dk, dv, dbeta), call[1:4], strict=True))
    dremoval = None if dremoval is None or call.removal_key is None else summed(dremoval, call.removal_key)
    return dq, dk, dv, dbeta, dS.view_as(call.S), dlog_decay, dremoval


def _block_gradient(
    block: Block, E: Tensor, S_start: Tensor, dy: Tensor, dS_end: Tensor, totals: tuple[Any, ...]
) -> Tensor:
    """Write the gradients of the block's queries, keys, values, β, decays and removal keys to `totals`, the gradients
    of all tokens in this order. Return that of `S_start`, the state before the block. E (B C dv) are the block's
    errors, `dy` is the gradient of all tokens' outputs, `dS_end` that of the state after the block."""
    work, place, S, dy = block.work, block.place, block.states(E, S_start), block.place.chunks(dy)
    upstream = work("upstream", (*block.rows.shape[:-1], E.shape[-1]))
    upstream[:, :-1].view(dy.shape).copy_(dy)
    dS_ends = _state_gradients(block, upstream, dS_end)
    of_rows, dS = upstream.flatten(1, 2), dS_ends[1:].flatten(0, 1)
    dproducts = torch.bmm(of_rows, E.mT, out=work("dproducts")).unflatten(1, block.rows.shape[1:3])
    # A has no diagonal: a token's prediction is that of the state before it
    dproducts[:, -1].diagonal(dim1=-2, dim2=-1).zero_()
    drows = torch.bmm(of_rows, S.mT, out=work("drows")).view(block.rows.shape)
    dkeys = torch.bmm(E, dS.mT, out=work("dkeys"))
    da = torch.mul(S, dS, out=work("scratch")).sum(-1, keepdim=True)
    dlog_decay = block.decays.gradient(block.products, dproducts, drows, dkeys, da)
    dbeta = torch.mul(block.k, dkeys, out=work("scratch")).sum(-1, keepdim=True)
    dq_total, dk_total, dv_total, dbeta_total, dlog_total, dremoval_total = totals
    place.write(dq_total, drows[:, :-1], combine=partial(torch.mul, other=block.scale))
    if dremoval_total is None:
        place.write(dk_total, drows[:, -1], block.beta, dkeys, combine=torch.addcmul)
    else:
        place.write(dk_total, block.beta, dkeys, combine=torch.mul)
        place.write(dremoval_total, drows[:, -1])
    place.write(dv_total, upstream[:, -1], combine=partial(torch.mul, other=-1))
    place.write(dbeta_total, dbeta)
    if dlog_decay is not None:
        place.write(dlog_total, dlog_decay)
    return dS_ends[0]


def _state_gradients(block: Block, upstream: Tensor, dS_end: Tensor) -> Tensor:
    """Return the gradients of the states at all ends of chunks (c+1 b d dv), from `dS_end`, that of the last state, and
    `upstream` (B g+1 C dv). Its rows of queries hold dY; write −X to its rows of keys."""
    work, place, rows = block.work, block.place, upstream.flatten(1, 2)
    dS_ends = work("dS", (place.number + 1, *dS_end.shape))
    dS_ends[-1] = dS_end
    dE = torch.bmm(block.P.mT, upstream[:, :-1].flatten(1, 2), out=work("dE"))
    X = work("X", (len(dS_end), *dE.shape[1:]))
    decays = [None] * place.number if block.chunk_decay is None else block.chunk_decay
    parts = map(
        place.per_chunk,
        (dE, upstream[:, -1], rows, block.M.mT, block.rows_since_start.mT, block.keys_until_end),
    )
    chunks = list(zip(dS_ends[:-1], dS_ends[1:], decays, *parts, strict=True))
    for start, end, a, de, x, rows, M, rows_since_start, keys_until_end in reversed(chunks):
        torch.neg(torch.bmm(M, de.baddbmm_(keys_until_end, end), out=X), out=x)
        if a is None:
            torch.baddbmm(end, rows_since_start, rows, out=start)
        else:
            torch.mul(end, a, out=start).baddbmm_(rows_since_start, rows)
    return dS_ends
