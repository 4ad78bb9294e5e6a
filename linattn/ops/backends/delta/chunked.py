"""Matrix products inside chunks of tokens, a running state between them: the form for training and prefill. Yang et
al., https://arxiv.org/abs/2406.06484, section 3.2, the WY form.

A chunk's tokens write K⁻ᵀ E, with keys times β, where e_t = v_t − what the decayed state before t says at k_t. With
what decays between tokens in A = tril(k (β k)ᵀ, −1) and P = tril(q (β k)ᵀ), since the chunk began in K⁺ and Q⁺, and
until it ends in K⁻:

    (I + A) E = V − K⁺ S        y = Q⁺ S + P E        S ← a S + K⁻ᵀ E

Shapes: a segment has c chunks, of C tokens, of b states, B = c b, and g queries share a state."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.backends.delta.call import DeltaCall
from linattn.ops.backends.halves import Factors, factors, inverse, similarities

# half of A and P is thrown away, so short chunks save products; their states cost memory traffic
SHORTEST, LONGEST = 16, 64
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
        E, S_in, S = segment.run(S)
        place.write(y_view, segment.outputs(E, S_in))
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
    chunk: int
    lead: int

    @property
    def number(self) -> int:
        return -(-self.length // self.chunk)

    def load(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the chunks of (*b *g n d) as (B g C d)."""
        x = x.narrow(-2, self.start, self.length).to(dtype)
        missing = self.number * self.chunk - self.length
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
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


def chunk_length(call: DeltaCall) -> int:
    """Return half the shorter side of a state, as a power of two from 16 to 64."""
    length = SHORTEST
    while length < min(LONGEST, min(call.S.shape[-2:]) / 2):
        length *= 2
    return length


def segment_length(call: DeltaCall) -> int:
    (*lead, d, dv), chunk = call.S.shape, chunk_length(call)
    return max(chunk, BLOCK // max(1, math.prod(lead) * max(d, dv)) // chunk * chunk)


def number_of_segments(call: DeltaCall) -> int:
    """Return the number of segments per sequence. Works with a symbolic length."""
    n, chunk = call.q.shape[-2], chunk_length(call)
    return -(-(n // chunk * chunk) // segment_length(call)) - (-(n % chunk) // chunk)


def cut(call: DeltaCall) -> list[Place]:
    """Cut the tokens into segments of full chunks; what is left is a chunk of its own, of a power of two of tokens."""
    n, step, chunk, lead = call.q.shape[-2], segment_length(call), chunk_length(call), call.S.ndim - 2
    end = n // chunk * chunk
    cuts = [Place(start, min(step, end - start), chunk, lead) for start in range(0, end, step)]
    return [*cuts, Place(end, n - end, 1 << (n - end - 1).bit_length(), lead)] if end < n else cuts


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
        self.k, self.v, self.beta, levels = k.squeeze(1), v.squeeze(1), beta.squeeze(1), list(factors(decay.squeeze(1)))
        self.written, self.decay = self.beta * self.k, levels
        self.since, self.until = (x.squeeze(1) for x in levels[-1][1:])
        self.over = self.since[:, -1].unsqueeze(-1)
        self.weights = weights(levels) if self.since.shape[-1] == 1 else None
        # queries first, then keys: what they ask of the state, and of one another
        asking = (self.asking * self.since.unsqueeze(1)).flatten(1, 2)
        self.q_in, self.k_in, self.k_out = *self._sides(asking), self.written * self.until
        self.products = self._products()
        self.P, A = self._sides(self.products.flatten(1, 2))
        self.M = inverse(A)
        self.W = self.M @ self.k_in

    def _sides(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cut what belongs to queries from what belongs to keys, the last C rows of (B (g+1)C d)."""
        first = x.shape[1] - self.place.chunk
        return x[:, :first], x[:, first:]

    def _products(self) -> Tensor:
        """P and A, (B g+1 C C), the latter with a diagonal. A decay per head takes one product, and its weights."""
        if self.weights is not None:
            products = self.asking.flatten(1, 2) @ self.written.mT
            return products.unflatten(1, self.asking.shape[1:3]).mul_(self.weights)
        products = similarities(self.asking, self.written, self.decay)
        products.diagonal(dim1=-2, dim2=-1).add_((self.asking * self.written.unsqueeze(1)).sum(-1))
        return products

    def run(self, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return E (B C dv), the states that enter the chunks (B d dv), and the last: E = M (V − K⁺ S)."""
        E, S_ends = self.M @ self.v, S.new_empty(self.place.number + 1, *S.shape)
        S_ends[0] = S
        each = zip(*(self.place.chunks(x) for x in (E, self.W, self.k_out, self.over)), strict=True)
        for i, (e, w, k_out, over) in enumerate(each):
            e.baddbmm_(w, S_ends[i], alpha=-1)
            torch.mul(over, S_ends[i], out=S_ends[i + 1]).baddbmm_(k_out.mT, e)
        return E, S_ends[:-1].flatten(0, 1), S_ends[-1]

    def outputs(self, E: Tensor, S_in: Tensor) -> Tensor:
        """(B gC dv)"""
        return torch.baddbmm(self.P @ E, self.q_in, S_in)


def spread(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    return x.expand(*lead, *x.shape[-2:])


def weights(levels: list[Factors]) -> Tensor:
    """Return what decays between two tokens, (B 1 C C), for decays per head."""
    one = torch.ones_like(levels[-1].since)
    D = similarities(one, one.squeeze(1), levels)
    D.diagonal(dim1=-2, dim2=-1).fill_(1)
    return D
