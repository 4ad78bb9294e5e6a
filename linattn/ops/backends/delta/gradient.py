"""The gradient of the chunked form, from the last segment to the first. What is saved for it is the inputs and one
state per segment; the rest is computed again.

With X = Tᵀ dU, where T = (I + β A)⁻¹ β, so that U = T (V − K⁺ S):

    dU = Pᵀ dY + K⁻ dS'    dS = a dS' + Q⁺ᵀ dY − K⁺ᵀ X    dV = X    dK⁺ = −X Sᵀ    dA = −X Uᵀ    dP = dY Uᵀ"""

import torch
from torch import Tensor

from linattn.ops.backends.base import decay_gradient, summed
from linattn.ops.backends.delta.call import DeltaCall
from linattn.ops.backends.delta.chunked import Segment, beside_tokens, cut, forward, spread, weights
from linattn.ops.backends.delta.halves import Factors, similarities_gradient, sum_since, sum_until
from linattn.ops.backends.operator import Tensors


def gradient(call: DeltaCall, saved: Tensors, grads: Tensors) -> Tensors:
    """Return gradients of the call's six tensors."""
    (S_saved,), (dy, dS) = saved, grads
    assert dy is not None and dS is not None
    if S_saved is None or S_saved.shape[0] == 0:
        S_saved = forward(call, True)[2]
    lead, dq = call.S.shape[:-2], call.q.new_empty(call.q.shape)
    dk, dv, dbeta = (x.new_empty(spread(x, lead).shape) for x in (call.k, call.v, call.beta))
    dlog_decay = None if call.log_decay is None else dS.new_empty(spread(call.log_decay, lead).shape)
    totals = beside_tokens(dq, call), dk, dv, dbeta, dlog_decay
    dy, dS = beside_tokens(dy, call), dS.reshape(S_saved.shape[1:])
    for i, place in reversed(list(enumerate(cut(call)))):
        upstream = place.load(dy, dS.dtype).flatten(1, 2)
        *found, dS = _of_segment(Segment(call, place), S_saved[i], upstream, dS)
        for total, part in zip(totals, found, strict=True):
            if total is not None:
                place.write(total, part)
    dk, dv, dbeta = summed(dk, call.k), summed(dv, call.v), summed(dbeta, call.beta)
    if call.log_decay is not None and dlog_decay is not None:
        dlog_decay = decay_gradient(dlog_decay, call.log_decay)
    return dq, dk, dv, dbeta, dS.view_as(call.S), dlog_decay


def _of_segment(s: Segment, S: Tensor, dy: Tensor, dS: Tensor) -> tuple[Tensor, ...]:
    """Return gradients of queries, keys, values, β, decays and the state that enters, given dy (B gC dv) and that of
    the state that leaves."""
    U, S_in, _ = s.run(S)
    dU, dS_out, dS = _of_states(s, dy, dS)
    Z = s.M.mT @ dU
    X = s.beta * Z
    # β multiplies V − K⁺ S − A U
    dbeta = (Z * (s.v - s.k_in @ S_in - s.A @ U)).sum(-1, keepdim=True)
    dP = torch.cat([dy, -X], 1) @ U.mT
    dP = dP.unflatten(1, s.asking.shape[1:3]).tril()
    dP[:, -1].tril_(-1)
    dasking, dk, dlog_decay = _of_products(dP, s.asking, s.k, s.levels)
    dasked_in = torch.cat([dy, -X], 1) @ S_in.mT
    dasked_in = dasked_in.unflatten(1, s.asking.shape[1:3]) * s.since.unsqueeze(1)
    dk_out = U @ dS_out.mT * s.until
    over = s.over * (S_in * dS_out).sum(-1, keepdim=True)
    e = dlog_decay.shape[-1]
    dlog_decay += sum_since(_per_decay((s.asking * dasked_in).sum(1), e))
    dlog_decay += sum_until(_per_decay(s.k * dk_out, e)) + _per_decay(over.mT, e)
    dasking += dasked_in
    return dasking[:, :-1], dk + dk_out + dasking[:, -1], X, dbeta, dlog_decay, dS


def _per_decay(x: Tensor, e: int) -> Tensor:
    """Sum over channels if they decay alike."""
    return x if e == x.shape[-1] else x.sum(-1, keepdim=True)


def _of_states(s: Segment, dy: Tensor, dS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dU, the gradients of the states that leave the chunks, and that of the state that enters the first."""
    chunks, dU, reads = s.place.chunks, s.P.mT @ dy, s.q_in.mT @ dy
    leaving = dS.new_empty(s.place.number, *dS.shape)
    each = zip(*map(chunks, (dU, s.k_out, s.over, reads, s.W)), leaving, strict=True)
    for du, k_out, over, read, W, kept in reversed(list(each)):
        kept.copy_(dS)
        du.baddbmm_(k_out, dS)
        dS = torch.baddbmm(torch.addcmul(read, over, dS), W.mT, du, alpha=-1)
    return dU, leaving.flatten(0, 1), dS


def _of_products(dP: Tensor, x: Tensor, k: Tensor, levels: list[Factors]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, k and the decays through `decayed_products`; dP is zero above the diagonal."""
    if levels[0].since.shape[-1] == 1:
        flat = x.flatten(1, 2)
        dD = (dP * (flat @ k.mT).view_as(dP)).sum(1, keepdim=True)
        one = torch.ones_like(levels[-1].since)
        _, _, dlog_decay = similarities_gradient(dD, one, one.squeeze(1), levels)
        G = (dP * weights(levels)).flatten(1, 2)
        return (G @ k).view_as(x), G.mT @ flat, dlog_decay
    dx, dk, dlog_decay = similarities_gradient(dP, x, k, levels)
    same = dP.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return dx.addcmul_(same, k.unsqueeze(1)), dk + (same * x).sum(1), dlog_decay
