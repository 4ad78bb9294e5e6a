"""The gradient of the chunked form, from the last segment to the first. What is saved for it is the inputs, E, the
matrices [P, A, M] of each chunk and one state per segment; the rest is computed again.

Given the gradient dY of the outputs and dS' of a state that leaves a chunk, with X = dE and [P, A], [Q⁺, K⁺] as there:

    X = Pᵀ dY + K⁻ dS' − Aᵀ X      dV = X      dS = a dS' + [Q⁺, K⁺]ᵀ [dY, −X]
    d[P, A] = [dY, −X] Eᵀ          d[Q⁺, K⁺] = [dY, −X] Sᵀ          dK⁻ = E dS'ᵀ"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from linattn.ops.calls import DeltaCall
from linattn.ops.fast.blocks import Workspace, empty_like
from linattn.ops.fast.delta import Segment, arrange, forward, of_chunks, sizes
from linattn.ops.numerics import decay_gradient, summed
from linattn.ops.operator import Tensors


def gradient(call: DeltaCall, saved: Tensors, grads: Tensors) -> Tensors:
    """Return gradients of the call's six tensors."""
    (S_saved, E_saved, kept), (dy, dS) = saved, grads
    assert dy is not None and dS is not None
    if S_saved is None or E_saved is None or kept is None or S_saved.shape[0] == 0:
        S_saved, E_saved, kept = forward(call, True)[2:]
    dq, work = empty_like(call.q, call.q.shape), Workspace(call.S)
    given, (dq_view, dy) = arrange(call, dq, dy)
    dk, dv, dbeta = (empty_like(x, x.shape) for x in given[1:4])
    dlog_decay = None if given.log_decay is None else empty_like(dS, given.log_decay.shape)
    totals, dS = (dq_view, dk, dv, dbeta, dlog_decay), dS.reshape(given.S.shape).clone()
    for states, places in sizes(call).cut(call.S.shape[:-2], call.q.shape[-2]):
        for i, place in reversed(list(enumerate(places))):
            segment = Segment(given, place, work, of_chunks(kept, place, states))
            E = of_chunks(E_saved, place, states).flatten(0, 1)
            dS[states] = _of_segment(segment, E, S_saved[i, states], dy, dS[states], totals)
    if call.log_decay is not None and dlog_decay is not None:
        dlog_decay = decay_gradient(dlog_decay, call.log_decay)
    return dq, summed(dk, call.k), summed(dv, call.v), summed(dbeta, call.beta), dS.view_as(call.S), dlog_decay


def _of_segment(s: Segment, E: Tensor, S: Tensor, dy: Tensor, dS: Tensor, totals: tuple[Any, ...]) -> Tensor:
    """Write the gradients of queries, keys, values, β and decays to where they belong in `totals`, and return that of
    the state that enters, given dy of all tokens and dS of the state that leaves."""
    work, S_in, dy = s.work, s.again(E, S), s.place.chunks(dy)
    upstream = work("upstream", (*s.asking.shape[:-1], E.shape[-1]))
    upstream[:, :-1].view(dy.shape).copy_(dy)
    dS_ends = _of_states(s, upstream, dS)
    rows, leaving = upstream.flatten(1, 2), dS_ends[1:].flatten(0, 1)
    dproducts = torch.bmm(rows, E.mT, out=work("dproducts")).unflatten(1, s.asking.shape[1:3])
    # no token asks itself what the state says at its key
    dproducts[:, -1].diagonal(dim1=-2, dim2=-1).zero_()
    dasking = torch.bmm(rows, S_in.mT, out=work("dasking")).view(s.asking.shape)
    dwritten = torch.bmm(E, leaving.mT, out=work("dwritten"))
    dover = torch.mul(S_in, leaving, out=work("scratch")).sum(-1, keepdim=True)
    dlog_decay = s.inside.gradient(dproducts, dasking, dwritten, dover)
    dbeta = torch.mul(s.asking[:, -1], dwritten, out=work("scratch")).sum(-1, keepdim=True)
    of_q, of_k, of_v, of_beta, of_decay = totals
    s.place.write(of_q, dasking[:, :-1], by=partial(torch.mul, other=s.scale))
    s.place.write(of_k, dasking[:, -1], s.beta, dwritten, by=torch.addcmul)
    s.place.write(of_v, upstream[:, -1], by=partial(torch.mul, other=-1))
    s.place.write(of_beta, dbeta)
    if dlog_decay is not None:
        s.place.write(of_decay, dlog_decay)
    return dS_ends[0]


def _of_states(s: Segment, upstream: Tensor, dS: Tensor) -> Tensor:
    """Return the gradients of the states at the ends of all chunks, (c+1 b d dv). −X takes its place beside dY,
    in `upstream` (B g+1 C dv)."""
    dS_ends, rows = s.ends("dS", dS, -1), upstream.flatten(1, 2)
    dE = torch.bmm(s.P.mT, upstream[:, :-1].flatten(1, 2), out=s.work("dE"))
    X = s.work("X", (len(dS), *dE.shape[1:]))
    parts = map(s.place.each, (dE, upstream[:, -1], rows, s.M.mT, s.asking_in.mT, s.k_out))
    for before, after, a, de, x, rows, M, asking, k_out in reversed(
        list(zip(dS_ends, dS_ends[1:], s.over(), *parts, strict=False))
    ):
        torch.neg(torch.bmm(M, de.baddbmm_(k_out, after), out=X), out=x)
        if a is None:
            torch.baddbmm(after, asking, rows, out=before)
        else:
            torch.mul(after, a, out=before).baddbmm_(asking, rows)
    return dS_ends
