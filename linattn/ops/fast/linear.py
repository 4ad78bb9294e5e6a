"""Matrix products inside chunks of tokens, a running state between them: the form for training and prefill, on any
device. Blocks of the sequence small enough for the cache are loaded, mapped, multiplied and written once.

With D_ij the decay from key j to query i, r_i that since the chunk began, w_j that until it ends, a that over it all,
each a number or one per channel,

    A = φ(q) φ(k)ᵀ ∘ D        y = (A v + r φ(q) S) / (A 1 + r φ(q)·z)        S ← a S + (w φ(k))ᵀ v

Shapes: a block has c chunks, of C tokens, of b sequences, B = c b, and g queries share a key. Chunks stand one after
another in memory, so that every product is one of three-dimensional batches."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from linattn.ops.calls import CausalCall
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.fast.blocks import Place, Sizes, Workspace, beside_tokens, empty_like
from linattn.ops.fast.decays import NoDecay, decayed_products
from linattn.ops.numerics import divide, infinite_if_none

# half of A is thrown away, so short chunks save products; their states, one per chunk, cost memory traffic
SHORTEST, LONGEST = 16, 64
# a block's keys or values are a megabyte in float32; blocks of fewer tokens would save a state too often
BLOCK, SEGMENT = 2**18, 256


def forward(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return outputs, the last state, and the states that enter each block, (i b f dv) and (i b 1 f), if `save`."""
    results, plan = empty(call, save), sizes(call).cut(call.S.shape[:-2], call.q.shape[-2])
    y, S_end, z_end, S_saved, z_saved = results
    (call, (y,)), work = arrange(call, y), Workspace(call.S)
    S_end, z_end = S_end.flatten(0, -3), z_end.unsqueeze(-2).flatten(0, -3)
    for rows, places in plan:
        S, z = call.S[rows], call.z[rows]
        for i, place in enumerate(places):
            if save:
                S_saved[i, rows], z_saved[i, rows] = S, z
            block, b = Block(call, place, z, work), len(S)
            S_ends, z_ends, A, d = block.run(S, z)
            part = torch.bmm(A, block.v, out=work("y")).baddbmm_(block.q_in, S_ends[:-b])
            place.write(y, part if d is None else part.div_(d))
            S, z = S_ends[-b:], z_ends[-b:]
        S_end[rows], z_end[rows] = S, z
    return results


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return results without numbers, of a symbolic length too."""
    (*lead, f, dv), blocks = call.S.shape, sizes(call).count(call.q.shape[-2]) if save else 0
    y = empty_like(call.v, (*call.q.shape[:-1], dv))
    saved = ((blocks, math.prod(lead), *shape) for shape in ((f, dv), (1, f)))
    return y, *(call.S.new_empty(shape) for shape in (call.S.shape, call.z.shape, *saved))


def sizes(call: CausalCall) -> Sizes:
    """Choose sizes of blocks that fit the cache. A chunk is half the shorter side of a state, as a power of two from 16
    to 64. Where queries of the first dimension share a state, it is not cut."""
    (rows, *others, n, _), chunk = call.q.shape, SHORTEST
    while chunk < min(LONGEST, min(call.S.shape[-2:]) / 2):
        chunk *= 2
    heads, block = max(1, math.prod(others)), BLOCK // max(1, *call.S.shape[-2:])
    step = rows if call.S.shape[0] < rows else max(1, block // (max(1, min(n, SEGMENT)) * heads))
    per_channel = call.log_decay is not None and call.log_decay.ndim == call.q.ndim
    return Sizes(step, max(SEGMENT, block // (max(1, min(rows, step)) * heads)) // chunk * chunk, chunk, per_channel)


def arrange(call: CausalCall, *outputs: Tensor) -> tuple[CausalCall, list[Tensor]]:
    """View q and outputs as (*b *g n d), k and v as (*b n d), mask and decays as (*b n 1), decays per channel as
    (*b n f), the state as (b f dv) and (b 1 f)."""
    lead = call.z.shape[:-1]
    q, *others = (beside_tokens(x, lead, call.q.shape) for x in (call.q, *outputs))
    k, v, S, z = call.k.expand(*lead, -1, -1), call.v.expand(*lead, -1, -1), call.S, call.z.unsqueeze(-2)
    per_key = (x if x is None or x.ndim == k.ndim else x.unsqueeze(-1) for x in (call.log_decay, call.key_mask))
    log_decay, key_mask = (None if x is None else x.expand(*lead, -1, -1) for x in per_key)
    return CausalCall(q, k, v, S.flatten(0, -3), z.flatten(0, -3), log_decay, key_mask, *call[7:]), others


class Block:
    """Hold features and values of one block in the accumulation dtype: q (B g C f), with "keys" over the sums of the
    keys that each sees, k (B C f), v (B C dv), r q as `q_in` (B gC f), w k as `k_out`, and a for S and z as `overs`."""

    def __init__(self, call: CausalCall, place: Place, z: Tensor, work: Workspace):
        phi, self.normalize, self.place, self.work = ELEMENTWISE[call.feature_map], call.normalize, place, work
        self.nonnegative, self.missing, self.log_decay = phi.nonnegative, None, None
        self.features, self.k = place.load(call.q, "q", work, phi), place.load(call.k, "k", work, phi)
        self.v = place.load(call.v, "v", work)
        # features of zeros may be anything
        self.k[:, place.present :] = 0
        per_query = self.features.unflatten(1, (-1, place.chunk))
        if call.key_mask is not None:
            self.missing = ~place.chunks(call.key_mask).flatten(0, place.lead)
            self.k.masked_fill_(self.missing, 0)
            self.v.masked_fill_(self.missing, 0)
            # what a masked token holds, NaN too, must not reach the gradients of the keys that its query sees
            per_query.masked_fill_(self.missing.unsqueeze(1) & ~per_query.sum(-1, keepdim=True).isfinite(), 0)
        if call.log_decay is not None:
            self.log_decay = place.load(call.log_decay, "log_decay", work)
        self.sums = None if call.normalize != "keys" else KeySums(self.k, self.log_decay, z, place)
        self.q = per_query if self.sums is None else divide(per_query, self.sums.z.unsqueeze(1))
        if self.log_decay is None:
            self.inside = NoDecay(self.q, self.k, work)
        else:
            self.inside = decayed_products(self.q, self.k, self.log_decay, work, place.number)
        self.q_in, self.k_out, over = self.inside.asking_in.flatten(1, 2), self.inside.written_out, self.inside.over
        over = None if over is None else over.unflatten(0, (place.number, len(z)))
        self.overs = over, None if over is None else over.mT

    def run(self, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the states at the c + 1 ends of all chunks, S (cb+b f dv) and z (cb+b 1 f), from those that enter, A
        (B gC C), and q·z (B gC 1), if outputs are divided by it."""
        k, b = self.k_out, len(S)
        S_ends, z_ends = (self.work(name, (len(k) + b, *x.shape[1:])) for name, x in (("S", S), ("z", z)))
        S_ends[:b], z_ends[:b] = S, z
        S_ends[b:].baddbmm_(k.mT, self.v, beta=0)
        torch.sum(k, 1, keepdim=True, out=z_ends[b:])
        for ends, over in zip((S_ends, z_ends), self.overs, strict=True):
            scan(ends, self.place, over)
        A, d = self.inside.products.flatten(1, 2), None
        if self.normalize == "output":
            # as a matrix product, q·z would take half the time of a full one
            read = torch.mul(self.q_in, z_ends[:-b], out=self.work("scratch")).sum(-1, keepdim=True)
            d = infinite_if_none(A.sum(-1, keepdim=True).add_(read), nonnegative=self.nonnegative)
        return S_ends, z_ends, A, d


def scan(ends: Tensor, place: Place, over: Tensor | None, *, reverse: bool = False) -> None:
    """Scan over chunks in place: S_{c+1} = a_c S_c + ΔS_c. Runs backwards for gradients."""
    states = ends.unflatten(0, (place.number + 1, -1)).unbind(0)
    weights = None if over is None else over.unbind(0)
    for i in reversed(range(place.number)) if reverse else range(place.number):
        done, following = (states[i + 1], states[i]) if reverse else (states[i], states[i + 1])
        following.add_(done) if weights is None else following.addcmul_(done, weights[i])


class KeySums:
    """z_t = α_t z_{t−1} + k_t for all tokens (B C f), given that before the first (b 1 f)."""

    def __init__(self, k: Tensor, log_decay: Tensor | None, z: Tensor, place: Place):
        self.alpha = k.new_ones(*k.shape[:2], 1) if log_decay is None else log_decay.exp()
        self.before, self.place = z, place
        self.z = self._scan(k, self.alpha, z)

    def _scan(self, k: Tensor, alpha: Tensor, z: Tensor) -> Tensor:
        sums, since = k.clone(), alpha.clone()
        for (earlier, decay), (x, a) in pairwise(zip(sums.unbind(1), since.unbind(1), strict=True)):
            x.addcmul_(a, earlier)
            a.mul_(decay)
        for of_chunk, decay in zip(self.place.each(sums), self.place.each(since), strict=True):
            z = of_chunk.addcmul_(decay, z)[:, -1:]
        return sums

    def gradient(self, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of keys, of logarithms of decays per channel, and of the sums that enter, by the same
        scan in reverse: g_t = dz_t + α_{t+1} g_{t+1}."""
        alpha, b = self._reversed(self.alpha), len(self.before)
        g = self._scan(self._reversed(dz), self._earlier(alpha, alpha.new_ones(b, 1, 1)), torch.zeros_like(self.before))
        first, g = g[-b:, -1:] * alpha[-b:, -1:], self._reversed(g)
        return g, g * self.alpha * self._earlier(self.z, self.before), first

    def _reversed(self, x: Tensor) -> Tensor:
        """Turn the tokens of a block (cb C f) around."""
        return x.unflatten(0, (self.place.number, -1)).flip(0, 2).flatten(0, 1)

    @staticmethod
    def _earlier(x: Tensor, first: Tensor) -> Tensor:
        """Return what stands before each token of a block (cb C f), given that for the first (b 1 f)."""
        ends = torch.cat([first.expand(-1, -1, x.shape[2]), x[: len(x) - len(first), -1:]])
        return torch.cat([ends, x[:, :-1]], 1)
