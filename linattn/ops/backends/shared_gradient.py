"""The gradient of shared.py, in one pass over the blocks from the last to the first. What is saved for it is the inputs
and a state for every block; the rest is computed again."""

import torch
from torch import Tensor

from linattn.ops.backends.base import CausalCall, decay_gradient, summed
from linattn.ops.backends.operator import Tensors
from linattn.ops.backends.shared import Block, Row, cut, forward, rows
from linattn.ops.backends.workspace import Workspace, empty_like


def gradient(call: CausalCall, saved: Tensors, grads: Tensors) -> Tensors:
    """Return gradients of the call's seven tensors."""
    (states,), (dy, dS, dz) = saved, grads
    assert dy is not None and dS is not None and dz is not None and call.log_decay is not None
    if states is None or states.shape[0] == 0:
        states = forward(call, save=True)[3]
    (*lead, heads, f, dv), n = call.S.shape, call.q.shape[-2]
    dq, dk = (empty_like(x, (*lead, n, f)) for x in (call.q, call.k))
    # the heads of a token side by side, as its values mostly are
    dv_all = empty_like(call.v, (*lead, n, heads, dv))
    dl, dS, dz = call.S.new_empty(*lead, n, heads), dS.clone(), dz.clone()
    results, work = (dy.transpose(-2, -3), dq, dk, dv_all, dl, dS, dz), Workspace(call.S)
    for row in rows(call, dy, dq, dk, dv_all, dl, dS, dz):
        _of_row(row, call, states[:, row.number], work)
    _, dq, dk, dv_all, dl, dS, dz = results
    of_v = summed(dv_all.transpose(-2, -3), call.v)
    # as `empty_gradient` tells graphs: a token's heads side by side, unless the gradient was summed
    of_v = of_v if of_v.shape == dy.shape else of_v.contiguous()
    of_decay = decay_gradient(dl.mT, call.log_decay).contiguous()
    return summed(dq.unsqueeze(-3), call.q), summed(dk.unsqueeze(-3), call.k), of_v, dS, dz, of_decay, None


def empty_gradient(call: CausalCall) -> Tensors:
    """Return gradients without numbers."""
    (*lead, heads, _, dv), n = call.S.shape, call.q.shape[-2]
    assert call.log_decay is not None
    found: list[Tensor | None] = [
        x.new_empty(x.shape) for x in (call.q, call.k, call.v, call.S, call.z, call.log_decay)
    ]
    if call.v.shape == (*lead, heads, n, dv):
        found[2] = call.v.new_empty(*lead, n, heads, dv).transpose(-2, -3)
    return *found, None


def _of_row(row: Row, call: CausalCall, states: Tensor, work: Workspace) -> None:
    """Write a row's gradients over its results."""
    dy, dq, dk, dv, dl, dS, dz = row.outputs
    heads = len(dz)
    dS_all = torch.cat([dS.movedim(0, 1).flatten(1), dz.mT], 1)
    for i, place in reversed(list(enumerate(cut(call)))):
        block = Block(row, place, work)
        given = place.chunks(dy).to(dS.dtype)
        found = Gradient(block, block.states(states[i])[:-1], given, dS_all)
        for target, part in zip((dq, dk, dv, dl), (found.q, found.k, found.v, found.log_decay), strict=True):
            place.chunks(target).copy_(part)
        dS_all = found.S.clone()
    dS.copy_(dS_all[:, :-heads].unflatten(1, (heads, -1)).movedim(1, 0))
    dz.copy_(dS_all[:, -heads:].mT)


class Gradient:
    """The gradients of a block, from those of its outputs (c C h dv) and of the state after it: q and k (c C f), v, S
    before it, and decays (c C h)."""

    def __init__(self, block: Block, S_in: Tensor, dy: Tensor, dS: Tensor):
        work, h = block.work, block.heads
        A, D = block.similarities(), block.D.flatten(0, 1)
        dy_heads, v_heads = block.per_head(dy, "dy"), block.per_head(block.v, "v")
        past = torch.mul(dy, block.r.unsqueeze(-1), out=work("past", dy.shape))
        asked = (block.asked(S_in) * dy).sum(-1)
        past = past.flatten(2)
        dS_out, self.S = self._of_states(block, past, dS)
        dA = torch.bmm(dy_heads, v_heads.mT, out=work("dA"))
        crossing = self._crossing(A.flatten(0, 1) * dA, asked.mT.flatten(0, 1)).unflatten(0, (-1, h)).mT
        dG = dA.mul_(D).unflatten(0, (-1, h)).sum(1).tril_()
        self.q = torch.bmm(past, S_in[..., :-h].mT).baddbmm_(dG, block.k)
        self.k = torch.bmm(block.written, dS_out.mT).baddbmm_(dG.mT, block.q)
        written = torch.bmm(block.k, dS_out, out=work("written_gradient"))
        of_v = written[..., :-h].unflatten(-1, (h, -1))
        later = (of_v * block.v).sum(-1).add_(written[..., -h:]).mul_(block.w)
        inside = torch.bmm(A.flatten(0, 1).mT, dy_heads, out=work("y")).unflatten(0, (-1, h)).transpose(1, 2)
        self.v = torch.addcmul(inside, of_v, block.w.unsqueeze(-1))
        over = (S_in * dS_out).sum(1)
        over = over[:, :-h].unflatten(1, (h, -1)).sum(-1).add_(over[:, -h:]).mul_(block.a)
        self.log_decay = crossing + (later.cumsum(1) - later) + over.unsqueeze(1)

    def _of_states(self, block: Block, past: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states after each chunk, (c f h·dv+h), and of that before the first."""
        ends = block.work("dS", (len(past) + 1, *dS.shape))
        ends[-1] = dS
        ends[:-1, :, : -block.heads].copy_(torch.bmm(block.q.mT, past, out=block.work("asked")))
        ends[:-1, :, -block.heads :] = 0
        over = block.over()
        for i in reversed(range(len(past))):
            ends[i].addcmul_(ends[i + 1], over[i])
        return ends[1:], ends[0]

    def _crossing(self, pairs: Tensor, asked: Tensor) -> Tensor:
        """Return the gradient of each token's decay through the queries of its chunk, (B C): the sum of A_ij dA_ij over
        the pairs that cross it, i ≥ t > j, and of what is asked of the state before the chunk over i ≥ t."""
        before = pairs @ pairs.new_ones(pairs.shape[1:]).triu(1) + asked.unsqueeze(-1)
        return before.tril().sum(1)
