"""Matrix products inside chunks of tokens, a running state between them: the form for training and prefill. Yang et
al., https://arxiv.org/abs/2406.06484, section 3.2, the WY form.

A chunk's tokens write K⁻ᵀ U, where u_t = β_t (v_t − what the decayed state before t says at k_t). With what decays
between tokens in A = tril(k kᵀ, −1) and P = tril(q kᵀ), since the chunk began in K⁺ and Q⁺, until it ends in K⁻:

    (I + β A) U = β (V − K⁺ S)        y = Q⁺ S + P U        S ← a S + K⁻ᵀ U

Shapes: a segment has c chunks, of C tokens, of b states, B = c b, and g queries share a state."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.backends.delta.call import DeltaCall
from linattn.ops.backends.delta.halves import Factors, factors, inverse, similarities

CHUNK = 64
# numbers of a segment's keys or values: a megabyte in float32
BLOCK = 2**18


def forward(call: DeltaCall, save: bool) -> tuple[Tensor, ...]:
    """Return outputs, the last state, and the states that enter each segment, (i b d dv), if `save`."""
    y, S_end, saved = empty(call, save)
    y_view, S = beside_tokens(y, call), call.S.reshape(saved.shape[1:])
    for i, place in enumerate(cut(call)):
        if save:
            saved[i] = S
        segment = Segment(call, place)
        U, S_in, S = segment.run(S)
        place.write(y_view, segment.outputs(U, S_in))
    return y, S_end.copy_(S.view_as(S_end)), saved


def empty(call: DeltaCall, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return results without numbers."""
    *lead, d, dv = call.S.shape
    saved = call.S.new_empty(number_of_segments(call) if save else 0, math.prod(lead), d, dv)
    return call.v.new_empty(*call.q.shape[:-1], dv), call.S.new_empty(call.S.shape), saved


class Place(NamedTuple):
    """Some chunks of the tokens of a call, the last of which may be filled up with zeros."""

    start: int
    length: int
    lead: int

    @property
    def chunk(self) -> int:
        """The tokens of a chunk: a power of two."""
        return min(CHUNK, 1 << (self.length - 1).bit_length())

    @property
    def number(self) -> int:
        return -(-self.length // self.chunk)

    def load(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the chunks of (*b *g n d) as (B g C d)."""
        x = x.narrow(-2, self.start, self.length).to(dtype)
        x = F.pad(x, (0, 0, 0, self.number * self.chunk - self.length))
        x = x.unflatten(-2, (self.number, self.chunk)).movedim(-3, 0)
        rows, groups = math.prod(x.shape[: self.lead + 1]), math.prod(x.shape[self.lead + 1 : -2])
        return x.reshape(rows, groups, *x.shape[-2:])

    def write(self, total: Tensor, part: Tensor) -> None:
        """Write (B … C d) to where it belongs in (*b *g n d)."""
        each = self.length // self.number
        target = total.narrow(-2, self.start, self.length).unflatten(-2, (self.number, each)).movedim(-3, 0)
        part = part.reshape(*target.shape[:-2], self.chunk, part.shape[-1])
        target.copy_(part.narrow(-2, 0, each))

    def chunks(self, x: Tensor) -> Tensor:
        """View (B …) as (c b …)."""
        return x.unflatten(0, (self.number, x.shape[0] // self.number))


def segment_length(call: DeltaCall) -> int:
    *lead, d, dv = call.S.shape
    return max(CHUNK, BLOCK // max(1, math.prod(lead) * max(d, dv)) // CHUNK * CHUNK)


def number_of_segments(call: DeltaCall) -> int:
    """Return the number of segments per sequence. Works with a symbolic length."""
    n = call.q.shape[-2]
    return -(-(n // CHUNK * CHUNK) // segment_length(call)) - (-(n % CHUNK) // CHUNK)


def cut(call: DeltaCall) -> list[Place]:
    """Cut the tokens into segments of full chunks; what is left is a chunk of its own."""
    n, step, lead = call.q.shape[-2], segment_length(call), call.S.ndim - 2
    end = n // CHUNK * CHUNK
    cuts = [Place(start, min(step, end - start), lead) for start in range(0, end, step)]
    return [*cuts, Place(end, n - end, lead)] if end < n else cuts


def beside_tokens(x: Tensor, call: DeltaCall) -> Tensor:
    """View queries or outputs (…, n, d) as (*b *g n d): leading dimensions whose queries share a state stand beside the
    tokens."""
    for i, size in enumerate(call.S.shape[:-2]):
        if size != call.q.shape[i]:
            x = x.unsqueeze(i).movedim(i + 1, -3)
    return x


class Segment:
    """Queries and keys (B g+1 C d), values, β and decays of one segment, and what follows from these alone."""

    def __init__(self, call: DeltaCall, place: Place):
        lead, dtype = call.S.shape[:-2], call.S.dtype
        decay = torch.zeros_like(call.beta) if call.log_decay is None else call.log_decay
        q, k, v, beta, decay = (
            place.load(x, dtype)
            for x in (beside_tokens(call.q, call), *(spread(x, lead) for x in (call.k, call.v, call.beta, decay)))
        )
        self.place, self.asking = place, torch.cat([q, k], 1)
        self.k, self.v, self.beta = k.squeeze(1), v.squeeze(1), beta.squeeze(1)
        self.levels = list(factors(decay.squeeze(1)))
        self.since, self.until = (x.squeeze(1) for x in self.levels[-1][1:])
        self.over = self.since[:, -1].unsqueeze(-1)
        self.q_in, self.k_in, self.k_out = q * self.since.unsqueeze(1), self.k * self.since, self.k * self.until
        self.q_in = self.q_in.flatten(1, 2)
        pairs = decayed_products(self.asking, self.k, self.levels)
        self.P, self.A = pairs[:, :-1].flatten(1, 2), pairs[:, -1].tril(-1)
        self.M = inverse(self.beta * self.A)
        self.T = self.M * self.beta.mT
        self.W = self.T @ self.k_in

    def run(self, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return U (B C dv), the states that enter the chunks (B d dv), and the last: U = T (V − K⁺ S)."""
        U, S_in = self.T @ self.v, S.new_empty(self.place.number, *S.shape)
        each = zip(*(self.place.chunks(x) for x in (U, self.W, self.k_out, self.over)), S_in, strict=True)
        for u, w, k_out, over, entering in each:
            entering.copy_(S)
            u.baddbmm_(w, S, alpha=-1)
            S = torch.baddbmm(over * S, k_out.mT, u)
        return U, S_in.flatten(0, 1), S

    def outputs(self, U: Tensor, S_in: Tensor) -> Tensor:
        """(B gC dv)"""
        return torch.baddbmm(self.P @ U, self.q_in, S_in)


def spread(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    return x.expand(*lead, *x.shape[-2:])


def decayed_products(x: Tensor, k: Tensor, levels: list[Factors]) -> Tensor:
    """Add x_i·k_i on the diagonal to `similarities`. A decay per head takes one product, and its weights."""
    if levels[0].since.shape[-1] == 1:
        return (x.flatten(1, 2) @ k.mT).unflatten(1, x.shape[1:3]) * weights(levels)
    P = similarities(x, k, levels)
    P.diagonal(dim1=-2, dim2=-1).add_((x * k.unsqueeze(1)).sum(-1))
    return P


def weights(levels: list[Factors]) -> Tensor:
    """Return what decays between two tokens, (B 1 C C), for decays per head."""
    one = torch.ones_like(levels[-1].since)
    D = similarities(one, one.squeeze(1), levels)
    D.diagonal(dim1=-2, dim2=-1).fill_(1)
    return D
