"""Heads that share queries and keys, and differ in values and decays, as in Mamba-2's scan: Dao and Gu,
https://arxiv.org/abs/2405.21060, section 6. Chunks of tokens and a running state between them, as in chunked.py, but
q and k are read once for all heads, and the decays go to the values and outputs:

    A_h = q kᵀ ∘ D_h        y_h = A_h v_h + r_h ∘ (q S_h)        S_h ← a_h S_h + kᵀ (w_h ∘ v_h)

The products with k and with the states take the values of all heads side by side. The key sums z_h are the states of
one more value per head, which is 1. Shapes: a block has c chunks, of C tokens, of one row of h heads; the states of a
chunk are (f, h dv + h)."""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.backends.base import CausalCall
from linattn.ops.backends.chunked import LONGEST, SHORTEST
from linattn.ops.backends.workspace import Workspace, empty_like

# numbers of a block's states: four megabytes in float32
BLOCK = 2**20


def forward(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return outputs, the last states, and the states that enter each block, (i rows f h·dv+h), if `save`."""
    results, work = empty(call, save), Workspace(call.S)
    y, S_end, z_end, saved = results
    for row in rows(call, y, S_end, z_end):
        S = torch.cat([row.S.movedim(0, 1).flatten(1), row.z.mT], 1)
        for i, place in enumerate(cut(call)):
            if save:
                saved[i, row.number] = S
            block = Block(row, place, work)
            ends = block.states(S)
            block.outputs(ends[:-1], place.chunks(row.outputs[0]))
            S = ends[-1].clone()
        heads = row.z.shape[0]
        row.outputs[1].copy_(S[:, :-heads].unflatten(1, (heads, -1)).movedim(1, 0))
        row.outputs[2].copy_(S[:, -heads:].mT)
    return results


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return results without numbers. The outputs of a token's heads stand side by side, as its values mostly do."""
    (*lead, heads, f, dv), n, (length, chunk) = call.S.shape, call.q.shape[-2], sizes(call)
    y = empty_like(call.v, (*lead, n, heads, dv)).transpose(-2, -3)
    places = -(-(n // chunk * chunk) // length) - (-(n % chunk) // chunk) if save else 0
    saved = call.S.new_empty(places, call.S[..., 0, 0, 0].numel(), f, heads * dv + heads)
    return y, call.S.new_empty(call.S.shape), call.z.new_empty(call.z.shape), saved


def sizes(call: CausalCall) -> tuple[int, int]:
    """Return (tokens per block, tokens per chunk). A chunk is half the shorter side of a state, as in chunked.py."""
    (*_, heads, f, dv), chunk = call.S.shape, SHORTEST
    while chunk < min(LONGEST, min(f, dv) / 2):
        chunk *= 2
    return max(1, BLOCK // max(1, heads * f * dv)) * chunk, chunk


class Place(NamedTuple):
    """Some chunks of the tokens of a row."""

    start: int
    number: int
    length: int

    def chunks(self, x: Tensor) -> Tensor:
        """View (n …) as (c C …)."""
        return x.narrow(0, self.start, self.number * self.length).unflatten(0, (self.number, self.length))


def cut(call: CausalCall) -> list[Place]:
    """Cut the tokens into blocks of full chunks; what is left is a chunk of its own length."""
    n, (step, chunk) = call.q.shape[-2], sizes(call)
    end = n // chunk * chunk
    places = [Place(start, min(step, end - start) // chunk, chunk) for start in range(0, end, step)]
    return [*places, Place(end, 1, n - end)] if end < n else places


class Row(NamedTuple):
    """One row: q and k (n f), v (n h dv), decays (n h), S (h f dv) and z (h f), and parts of the results."""

    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    S: Tensor
    z: Tensor
    outputs: tuple[Tensor, ...]


def rows(call: CausalCall, y: Tensor, *others: Tensor) -> Iterator[Row]:
    """Cut a call into rows. Of the results, y (*b h n dv) becomes (n h dv), the others stay (…)."""
    lead, (heads, f, dv), n = call.S.shape[:-3], call.S.shape[-3:], call.q.shape[-2]
    assert call.log_decay is not None
    sides = (
        call.q.expand(*lead, 1, n, f).squeeze(-3),
        call.k.expand(*lead, 1, n, f).squeeze(-3),
        call.v.expand(*lead, heads, n, dv).transpose(-2, -3),
        call.log_decay.expand(*lead, heads, n).mT,
        call.S,
        call.z,
        y.transpose(-2, -3),
        *others,
    )
    # an index per leading dimension keeps views, where flattening might copy
    for number, index in enumerate(product(*map(range, lead))):
        q, k, v, log_decay, S, z, *outputs = (x[index] for x in sides)
        yield Row(number, q, k, v, log_decay, S, z, tuple(outputs))


class Block:
    """One block of a row in the accumulation dtype: q and k (c C f), v (c C h dv), what decays inside of chunks D
    (c h C C), since they began r and until they end w (c C h), and over them a (c h), and G = tril(q kᵀ) (c C C)."""

    def __init__(self, row: Row, place: Place, work: Workspace):
        dtype = row.S.dtype
        self.q, self.k, self.v = (place.chunks(x).to(dtype) for x in (row.q, row.k, row.v))
        self.work, self.heads = work, self.v.shape[2]
        self._decay(place.chunks(row.log_decay))
        self.G = torch.bmm(self.q, self.k.mT).tril_()
        # beside its values, a one per head for the key sums
        c, C, h, dv = self.v.shape
        written = work("written", (c, C, h * dv + h))
        torch.mul(self.v, self.w.unsqueeze(-1), out=written[..., :-h].unflatten(-1, (h, dv)))
        written[..., -h:] = self.w
        self.written = written

    def _decay(self, log_decay: Tensor) -> None:
        """Sum logarithms in float64, so that differences of long sums stay exact; each −inf starts a sequence."""
        dtype, exact = self.v.dtype, torch.float32 if log_decay.device.type == "mps" else torch.float64
        fresh = log_decay == -torch.inf
        some = bool(fresh.any())
        total = (log_decay.masked_fill(fresh, 0) if some else log_decay).to(exact).cumsum(1)
        until, since, per_head = total[:, -1:] - total, total, total.mT.contiguous()
        c, h, C = per_head.shape
        D = torch.sub(per_head.unsqueeze(-1), per_head.unsqueeze(-2), out=self.work("D", (c, h, C, C)))
        # an exponential takes three times as long where its result is no normal number; G is zero where D is of no use
        self.D = D.clamp_(math.log(torch.finfo(dtype).tiny), 0).exp_()
        if some:
            count = fresh.cumsum(1)
            since = total.masked_fill(count > 0, -torch.inf)
            until = until.masked_fill(count[:, -1:] != count, -torch.inf)
            count = count.mT
            self.D.masked_fill_(count.unsqueeze(-1) != count.unsqueeze(-2), 0)
        self.r, self.w = since.to(dtype).exp(), until.to(dtype).exp()
        self.a = self.r[:, -1]

    def over(self) -> Tensor:
        """a for each number of a state's rows, (c 1 h·dv+h)."""
        return torch.cat([self.a.repeat_interleave(self.v.shape[-1], 1), self.a], 1).unsqueeze(1)

    def states(self, S: Tensor) -> Tensor:
        """Return the states at the c + 1 ends of all chunks, from that before the first."""
        ends = self.work("S", (len(self.k) + 1, *S.shape))
        ends[0] = S
        torch.bmm(self.k.mT, self.written, out=ends[1:])
        for done, following, a in zip(ends, ends[1:], self.over(), strict=False):
            following.addcmul_(done, a)
        return ends

    def asked(self, S_in: Tensor) -> Tensor:
        """r ∘ (q S) for all heads, (c C h dv), given the states that enter each chunk."""
        asked = torch.bmm(self.q, S_in[..., : -self.heads], out=self.work("asked")).view_as(self.v)
        return asked.mul_(self.r.unsqueeze(-1))

    def similarities(self, name: str = "A") -> Tensor:
        """A, (c h C C)"""
        return torch.mul(self.D, self.G.unsqueeze(1), out=self.work(name, self.D.shape))

    def per_head(self, x: Tensor, name: str) -> Tensor:
        """Copy (c C h dv) to (ch C dv)."""
        c, C, h, dv = x.shape
        return self.work(name, (c, h, C, dv)).copy_(x.transpose(1, 2)).flatten(0, 1)

    def outputs(self, S_in: Tensor, y: Tensor) -> None:
        """Write y, (c C h dv)."""
        v = self.per_head(self.v, "v")
        inside = torch.bmm(self.similarities().flatten(0, 1), v, out=self.work("y"))
        asked, inside = self.asked(S_in), inside.unflatten(0, (len(self.k), -1)).transpose(1, 2)
        torch.add(asked, inside, out=y) if y.dtype == asked.dtype else y.copy_(asked.add_(inside))
