"""The gradient of the chunked form, from the last segment to the first. What is saved for it is the inputs and one
state per segment; the rest is computed again.

With X = Mᵀ dE, where M = (I + A)⁻¹, so that E = M (V − K⁺ S):

    dE = Pᵀ dY + K⁻ dS'    dS = a dS' + Q⁺ᵀ dY − K⁺ᵀ X    dV = X    dK⁺ = −X Sᵀ    dA = −X Eᵀ    dP = dY Eᵀ"""

import torch
from torch import Tensor

from linattn.ops.backends.base import decay_gradient, summed
from linattn.ops.backends.delta.call import DeltaCall
from linattn.ops.backends.delta.chunked import Segment, beside_tokens, cut, forward, spread
from linattn.ops.backends.halves import similarities_gradient, sum_since, sum_until
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
    dy, dS = beside_tokens(dy, call), dS.reshape(S_saved.shape[1:]).clone()
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
    E, S_in, _ = s.run(S)
    dE, leaving, dS = _of_states(s, dy, dS)
    X = s.M.mT @ dE
    upstream, shape = torch.cat([dy, -X], 1), s.asking.shape
    dproducts = (upstream @ E.mT).view(*shape[:3], shape[2])
    # no token asks itself what the state says at its key
    dproducts[:, -1].diagonal(dim1=-2, dim2=-1).zero_()
    dasking, dwritten, dlog_decay = _of_products(s, dproducts)
    of_in, of_out = (upstream @ S_in.mT).view(shape) * s.since.unsqueeze(1), (E @ leaving.mT) * s.until
    dlog_decay += sum_since(_per_decay((s.asking * of_in).sum(1), s)) + sum_until(_per_decay(s.written * of_out, s))
    dlog_decay += _per_decay((s.over * (S_in * leaving).sum(-1, keepdim=True)).mT, s)
    dasking, dwritten = dasking.add_(of_in), dwritten.add_(of_out)
    dk, dbeta = torch.addcmul(dasking[:, -1], s.beta, dwritten), (s.k * dwritten).sum(-1, keepdim=True)
    return dasking[:, :-1], dk, X, dbeta, dlog_decay, dS


def _per_decay(x: Tensor, s: Segment) -> Tensor:
    """Sum over channels if they decay alike."""
    return x if s.weights is None else x.sum(-1, keepdim=True)


def _of_states(s: Segment, dy: Tensor, dS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dE, the gradients of the states that leave the chunks, and that of the state that enters the first."""
    chunks, dE, reads = s.place.chunks, s.P.mT @ dy, s.q_in.mT @ dy
    ends = dS.new_empty(s.place.number + 1, *dS.shape)
    ends[-1] = dS
    each = list(zip(*map(chunks, (dE, s.k_out, s.over, reads, s.W)), strict=True))
    for i, (de, k_out, over, read, W) in reversed(list(enumerate(each))):
        de.baddbmm_(k_out, ends[i + 1])
        # W = M K⁺, so that Wᵀ dE = K⁺ᵀ X
        torch.addcmul(read, over, ends[i + 1], out=ends[i]).baddbmm_(W.mT, de, alpha=-1)
    return dE, ends[1:].flatten(0, 1), ends[0]


def _of_products(s: Segment, dproducts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries and keys, of the keys times β, and of the decays through P and A."""
    if s.weights is not None:
        dlog_decay = _crossing((dproducts * s.products).sum(1))
        G = dproducts.mul_(s.weights).flatten(1, 2)
        return (G @ s.written).view(s.asking.shape), G.mT @ s.asking.flatten(1, 2), dlog_decay
    dasking, dwritten, dlog_decay = similarities_gradient(dproducts, s.asking, s.written, s.decay)
    same = dproducts.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dasking.addcmul_(same, s.written.unsqueeze(1))
    return dasking, dwritten.add_((same * s.asking).sum(1)), dlog_decay


def _crossing(pairs: Tensor) -> Tensor:
    """Sum over the pairs that cross each token, i ≥ t > j: the gradients of decays, (B C 1)."""
    return (pairs @ pairs.new_ones(pairs.shape[-2:]).triu(1)).tril().sum(1).unsqueeze(-1)
