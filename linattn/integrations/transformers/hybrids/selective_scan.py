"""Mamba-1's selective scan, S_i = exp(Δ_i A) ⊙ S_{i−1} + B_i v_iᵀ and y_i = C_i S_i, whose decays differ from token to
token and within the state. Gu & Dao, https://arxiv.org/abs/2312.00752

Such decays cannot be moved out of the sums, so no product of matrices computes this scan. It runs token by token, but
the rest of the work is done for a chunk of tokens at once, and for as many channels as the cache holds. The gradient
recomputes the states of each chunk from its first state, which is saved."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.numerics import check_exported_length
from linattn.ops.operator import Backend, Operator, Tensors

CHUNK = 32
# numbers of a block's states
BLOCK = 2**19


class ScanCall(NamedTuple):
    """Values v and time steps Δ (*b n c), rates A (*b d c), keys B and queries C (*b n d). All have one dtype and the
    same leading dimensions, at least one."""

    v: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor


def selective_scan(v: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Return y (*b n c) and the last state S (*b d c), for the tensors of a `ScanCall`."""
    call = ScanCall(v, delta, A, B, C)
    y, S = SELECTIVE_SCAN.choose(call)(call)
    return y, S


def definition(call: ScanCall, save: bool) -> tuple[Tensor, Tensor]:
    v, delta, A, B, C = call
    check_exported_length(v.shape[-2], "the selective scan")
    decays = (delta.unsqueeze(-2) * A.unsqueeze(-3)).exp()
    updates = B.unsqueeze(-1) * v.unsqueeze(-2)
    states = [torch.zeros_like(A)]
    for decay, update in zip(decays.unbind(-3), updates.unbind(-3), strict=True):
        states.append(decay * states[-1] + update)
    history = torch.stack(states, -3)[..., 1:, :, :]
    return (C.unsqueeze(-2) @ history).squeeze(-2), states[-1]


class _Part(NamedTuple):
    """The rows of the first dimension, and the channels, that are computed together."""

    rows: slice
    channels: slice

    def tokens(self, x: Tensor, tokens: slice) -> Tensor:
        """View tokens of x (*b n c) with the tokens in front."""
        return x[self.rows, ..., tokens, self.channels].movedim(-2, 0)

    def keys(self, x: Tensor, tokens: slice) -> Tensor:
        """View tokens of x (*b n d) with the tokens in front."""
        return x[self.rows, ..., tokens, :].movedim(-2, 0)

    def state(self, x: Tensor) -> Tensor:
        return x[self.rows, ..., self.channels]


def _parts(A: Tensor, n: int) -> Iterator[_Part]:
    (b, *lead, d, c), chunk = A.shape, max(1, min(n, CHUNK))
    # another device has no cache to keep a block in, and would wait for the loop
    most = BLOCK if A.device.type == "cpu" else A.numel() * chunk
    channels = max(1, min(c, most // max(1, chunk * d * math.prod(lead))))
    rows = max(1, most // max(1, chunk * d * c * math.prod(lead)))
    for row in range(0, b, rows):
        for channel in range(0, c, channels):
            yield _Part(slice(row, min(b, row + rows)), slice(channel, min(c, channel + channels)))


def _chunks(n: int) -> list[slice]:
    return [slice(start, min(n, start + CHUNK)) for start in range(0, n, CHUNK)]


def _empty(call: ScanCall, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    v, A = call.v, call.A
    starts = (-(-v.shape[-2] // CHUNK), *A.shape) if save else (0,)
    return v.new_empty(v.shape), A.new_empty(A.shape), v.new_empty(starts)


class _Work:
    """The tensors of one chunk of a part, with its tokens in front. All chunks use the same memory."""

    def __init__(self, call: ScanCall, part: _Part):
        self.call, self.part, self.A = call, part, part.state(call.A).contiguous()
        length = min(CHUNK, call.v.shape[-2])
        self._decays = self.A.new_empty(length, *self.A.shape)
        self._states = self.A.new_empty(length + 1, *self.A.shape)

    def scan(self, tokens: slice, S: Tensor) -> None:
        """Load a chunk and compute its states, from the state S before it on."""
        v, delta, _, B, C = self.call
        length = tokens.stop - tokens.start
        self.v, self.delta = (self.part.tokens(x, tokens).contiguous() for x in (v, delta))
        self.B, self.C = (self.part.keys(x, tokens).contiguous() for x in (B, C))
        self.decays, self.states = self._decays[:length], self._states[: length + 1]
        torch.mul(self.delta.unsqueeze(-2), self.A, out=self.decays).exp_()
        self.states[0] = S
        torch.mul(self.B.unsqueeze(-1), self.v.unsqueeze(-2), out=self.states[1:])
        states = self.states.unbind(0)
        for before, after, decay in zip(states, states[1:], self.decays.unbind(0), strict=False):
            after.addcmul_(before, decay)


def _forward(call: ScanCall, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    y, S, starts = _empty(call, save)
    S.zero_()
    n = call.v.shape[-2]
    for part in _parts(call.A, n):
        work, state = _Work(call, part), part.state(S)
        for i, tokens in enumerate(_chunks(n)):
            if save:
                part.state(starts[i]).copy_(state)
            work.scan(tokens, state)
            part.tokens(y, tokens).copy_((work.C.unsqueeze(-2) @ work.states[1:]).squeeze(-2))
            state.copy_(work.states[-1])
    return y, S, starts


def _gradient(call: ScanCall, saved: Tensors, grads: Tensors) -> Tensors:
    (v, delta, A, B, C), (starts,), (dy, dS) = call, saved, grads
    assert dy is not None and dS is not None
    if starts is None or not starts.numel():
        starts = _forward(call, True)[2]
    dv, ddelta = (x.new_empty(x.shape) for x in (v, delta))
    dA, dB, dC = (x.new_zeros(x.shape) for x in (A, B, C))
    n = v.shape[-2]
    for part in _parts(A, n):
        work, dstate = _Work(call, part), part.state(dS)
        scratch = torch.empty_like(work._decays)
        for i, tokens in reversed(list(enumerate(_chunks(n)))):
            work.scan(tokens, part.state(starts[i]))
            upstream = part.tokens(dy, tokens).contiguous()
            dstates = torch.mul(work.C.unsqueeze(-1), upstream.unsqueeze(-2), out=scratch[: len(work.decays)])
            dstates[-1] += dstate
            rows, decays = dstates.unbind(0)[::-1], work.decays.unbind(0)[::-1]
            for after, before, decay in zip(rows, rows[1:], decays, strict=False):
                before.addcmul_(after, decay)
            part.keys(dC, tokens).add_((work.states[1:] @ upstream.unsqueeze(-1)).squeeze(-1))
            part.keys(dB, tokens).add_((dstates @ work.v.unsqueeze(-1)).squeeze(-1))
            part.tokens(dv, tokens).copy_((work.B.unsqueeze(-2) @ dstates).squeeze(-2))
            dexponents = dstates.mul_(work.decays)
            dstate = dstates[0].clone()
            dexponents.mul_(work.states[:-1])
            part.tokens(ddelta, tokens).copy_(torch.mul(dexponents, work.A, out=work.decays).sum(-2))
            part.state(dA).add_(dexponents.mul_(work.delta.unsqueeze(-2)).sum(0))
    return dv, ddelta, dA, dB, dC


SELECTIVE_SCAN = Operator(
    "selective_scan",
    ScanCall,
    outputs=2,
    backends=(
        Backend("chunked", None, _forward, _gradient, _empty, saved=1, loops=True),
        Backend("reference", None, definition),
    ),
)
