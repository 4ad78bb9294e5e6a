"""The chunked form of causal linear attention: matrix products inside chunks of C tokens, a running state (S, z)
between them. A block has c chunks of b sequences, B = c b; g queries share a key. With the decay factors D_ij from key
j to query i, 0 for j > i, r_i from the chunk's start to i, w_j from j to the chunk's end, and a over the chunk,

    A = φ(q) φ(k)ᵀ ∘ D                                               intra-chunk
    y = (A v + r φ(q) S) / (A 1 + r φ(q)·z)                          outputs
    S ← a S + (w φ(k))ᵀ v        z ← a z + (w φ(k))ᵀ 1               inter-chunk, a scan

for queries q, keys k (C f), values v (C dv), and the S (f dv) and z (f) that enter the chunk. Decays are numbers per
head or per channel. In memory one chunk follows another, so that every product is one of three-dimensional batches.
This form serves training and prefill on any device."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.fast.blocks import Place, Sizes, Workspace, empty_like, group_view, scan
from linattn.ops.fast.decays import intra_chunk
from linattn.ops.numerics import divide, infinite_if_none

# tokens: longer chunks waste products, shorter blocks would save a state too often
LONGEST, SEGMENT = 64, 256

Pair = tuple[Tensor, Tensor]


def forward(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return y, the last S and z and, empty unless `save`, the S (i b f dv) and z (i b 1 f) that enter the i blocks."""
    results = empty(call, save)
    y, S, z, S_saved, z_saved = results
    S, z = S.flatten(0, -3), z.unsqueeze(-2).flatten(0, -3)
    views, (y,) = arrange(call, y)
    S.copy_(views.S)
    z.copy_(views.z)
    work = Workspace(call.S)
    for place in sizes(call).places(call.S.shape[:-2], call.q.shape[-2]):
        i, rows = place.position, place.states
        if save:
            S_saved[i, rows], z_saved[i, rows] = S[rows], z[rows]
        block = Block(views, place, z[rows], work)
        S_ends, z_ends = block.states(S[rows], z[rows])
        b = len(S_ends) - len(block.k)
        place.write(y, block.outputs(S_ends[:-b], z_ends[:-b]))
        S[rows], z[rows] = S_ends[-b:], z_ends[-b:]
    return results


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return uninitialized tensors for the results of `forward`. Works with a symbolic length."""
    (*lead, f, dv), blocks = call.S.shape, sizes(call).count(call.q.shape[-2]) if save else 0
    y = empty_like(call.v, (*call.q.shape[:-1], dv))
    saved = ((blocks, math.prod(lead), *shape) for shape in ((f, dv), (1, f)))
    return y, *(call.S.new_empty(shape) for shape in (call.S.shape, call.z.shape, *saved))


def sizes(call: CausalCall) -> Sizes:
    per_channel = call.log_decay is not None and call.log_decay.ndim == call.q.ndim
    return Sizes.fit(call.q, call.S, longest=LONGEST, segment=SEGMENT, padded=per_channel)


def arrange(call: CausalCall, *outputs: Tensor) -> tuple[CausalCall, list[Tensor]]:
    """Return the call with views of q as (*b *g n d), k and v as (*b n d), mask and decays as (*b n 1), decays per
    channel as (*b n f), S as (b f dv), z as (b 1 f), and views of `outputs`, or of their gradients, laid out as q's."""
    lead = call.z.shape[:-1]
    q, *others = (group_view(x, lead, call.q.shape) for x in (call.q, *outputs))
    k, v, S, z = call.k.expand(*lead, -1, -1), call.v.expand(*lead, -1, -1), call.S, call.z.unsqueeze(-2)
    per_key = (x if x is None or x.ndim == k.ndim else x.unsqueeze(-1) for x in (call.log_decay, call.key_mask))
    log_decay, key_mask = (None if x is None else x.expand(*lead, -1, -1) for x in per_key)
    return CausalCall(q, k, v, S.flatten(0, -3), z.flatten(0, -3), log_decay, key_mask, *call[7:]), others


class Block:
    """The chunks of the block at `place`, in the accumulation dtype. `features` (B gC f) are φ(q); if `normalize` is
    "keys", `q` (B g C f) are φ(q) divided by the running sums of keys from z (b 1 f) on, else the same; `k` (B C f) are
    φ(k), `v` (B C dv) values. The `decays` of q and k give r q as `q_since_start` (B gC f), w k as `k_until_end`, and a
    for S and for z as `chunk_decays`."""

    def __init__(self, call: CausalCall, place: Place, z: Tensor, work: Workspace):
        phi, self.normalize, self.place, self.work = ELEMENTWISE[call.feature_map], call.normalize, place, work
        self.nonnegative, self.missing, log_decay = phi.nonnegative, None, None
        self.features, self.k = place.load(call.q, "q", work, phi), place.load(call.k, "k", work, phi)
        self.v = place.load(call.v, "v", work)
        # φ(0) need not be 0
        self.k[:, place.tokens :] = 0
        per_query = self.features.unflatten(1, (-1, place.chunk))
        if call.key_mask is not None:
            self.missing = ~place.chunks(call.key_mask).flatten(0, place.lead)
            self.k.masked_fill_(self.missing, 0)
            self.v.masked_fill_(self.missing, 0)
            # a NaN in a masked query must not reach the gradients of the keys that the query sees
            per_query.masked_fill_(self.missing.unsqueeze(1) & ~per_query.sum(-1, keepdim=True).isfinite(), 0)
        if call.log_decay is not None:
            log_decay = place.load(call.log_decay, "log_decay", work)
        self.sums = None if call.normalize != "keys" else KeySums(self.k, log_decay, z, place)
        self.q = per_query if self.sums is None else divide(per_query, self.sums.z.unsqueeze(1))
        self.decays = intra_chunk(self.q, self.k, log_decay, work)
        self.q_since_start, self.k_until_end = self.decays.rows_since_start.flatten(1, 2), self.decays.keys_until_end
        a = self.decays.chunk_decay
        self.chunk_decays = (None, None) if a is None else (place.per_chunk(a), place.per_chunk(a).mT)

    def states(self, S: Tensor, z: Tensor) -> Pair:
        """Return the states at the c + 1 ends of chunks (cb+b f dv) and (cb+b 1 f), from S and z, those before them."""
        k, b = self.k_until_end, len(S)
        S_ends, z_ends = (self.work(name, (len(k) + b, *x.shape[1:])) for name, x in (("S", S), ("z", z)))
        S_ends[:b], z_ends[:b] = S, z
        S_ends[b:].baddbmm_(k.mT, self.v, beta=0)
        torch.sum(k, 1, keepdim=True, out=z_ends[b:])
        for ends, decay in zip((S_ends, z_ends), self.chunk_decays, strict=True):
            scan(ends, self.place, decay)
        return S_ends, z_ends

    def outputs(self, S: Tensor, z: Tensor) -> Tensor:
        """Return the outputs (B gC dv), from the states that enter the chunks, S (B f dv) and z (B 1 f)."""
        A, d = self.similarities(z)
        y = torch.bmm(A, self.v, out=self.work("y")).baddbmm_(self.q_since_start, S)
        return y if d is None else y.div_(d)

    def similarities(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return A (B gC C), and the denominators (B gC 1), None without a quotient, from the z before each chunk."""
        A = self.products = self.decays.products().flatten(1, 2)
        if self.normalize != "output":
            return A, None
        # as a matrix product, q·z would take half the time of a full one
        reads = torch.mul(self.q_since_start, z, out=self.work("scratch")).sum(-1, keepdim=True)
        return A, infinite_if_none(A.sum(-1, keepdim=True).add_(reads), nonnegative=self.nonnegative)


class KeySums:
    """The running sums z_t = α_t z_{t−1} + k_t of a block's keys (B C f), from z (b 1 f), the sum before the block."""

    def __init__(self, k: Tensor, log_decay: Tensor | None, z: Tensor, place: Place):
        self.alpha = k.new_ones(*k.shape[:2], 1) if log_decay is None else log_decay.exp()
        self.start, self.place = z, place
        self.z = self._scan(k, self.alpha, z)

    def _scan(self, k: Tensor, alpha: Tensor, z: Tensor) -> Tensor:
        sums, since = k.clone(), alpha.clone()
        for (earlier, decay), (x, a) in pairwise(zip(sums.unbind(1), since.unbind(1), strict=True)):
            x.addcmul_(a, earlier)
            a.mul_(decay)
        for chunk, decay in zip(self.place.per_chunk(sums), self.place.per_chunk(since), strict=True):
            z = chunk.addcmul_(decay, z)[:, -1:]
        return sums

    def gradient(self, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of keys, of log decays per channel, and of the sum before the block, from `dz`, that of
        the running sums, by the same scan in reverse: g_t = dz_t + α_{t+1} g_{t+1}."""
        alpha, b = self._reversed(self.alpha), len(self.start)
        g = self._scan(self._reversed(dz), self._earlier(alpha, alpha.new_ones(b, 1, 1)), torch.zeros_like(self.start))
        first, g = g[-b:, -1:] * alpha[-b:, -1:], self._reversed(g)
        return g, g * self.alpha * self._earlier(self.z, self.start), first

    def _reversed(self, x: Tensor) -> Tensor:
        """Return the tokens of a block (cb C f) in reverse order."""
        return self.place.per_chunk(x).flip(0, 2).flatten(0, 1)

    @staticmethod
    def _earlier(x: Tensor, first: Tensor) -> Tensor:
        """Shift the tokens of a block (cb C f) by one: each holds its predecessor, the first one `first` (b 1 f)."""
        ends = torch.cat([first.expand(-1, -1, x.shape[2]), x[: len(x) - len(first), -1:]])
        return torch.cat([ends, x[:, :-1]], 1)
