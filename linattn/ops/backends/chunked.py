"""Matrix products inside chunks of tokens, a running state between them: the form for training and prefill, on any
device. Blocks of the sequence small enough for the cache are loaded, mapped, multiplied and written once.

With D_ij the decay from key j to query i, r_i that since the chunk began, w_j that until it ends, a that over it all,

    A = φ(q) φ(k)ᵀ ∘ D        y = (A v + r φ(q) S) / (A 1 + r φ(q)·z)        S ← a S + (w φ(k))ᵀ v

Shapes: a block has c chunks, of C tokens, of b sequences, and g queries share a key. Chunks stand one after another in
memory, so that every product is one of three-dimensional batches."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.backends.base import CausalCall, divide, infinite_if_none
from linattn.ops.backends.workspace import Workspace, empty_like
from linattn.ops.elementwise import ELEMENTWISE

IDENTITY = ELEMENTWISE["identity"]
# half of A is thrown away, so short chunks save products; their states, one per chunk, cost memory traffic
SHORTEST, LONGEST = 16, 64
# a block's keys or values are a megabyte in float32; blocks of fewer tokens would save a state too often
BLOCK, SEGMENT = 2**18, 256


def forward(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return outputs, the last state, and the states that enter each block, (i b f dv) and (i b 1 f), if `save`."""
    results, plan = empty(call, save), cut(call)
    y, S_end, z_end, S_saved, z_saved = results
    (call, (y,)), work = arrange(call, y), Workspace(call.S)
    S_end, z_end = S_end.flatten(0, -3), z_end.unsqueeze(-2).flatten(0, -3)
    for rows, tiles in plan:
        S, z = call.S[rows], call.z[rows]
        for i, tile in enumerate(tiles):
            if save:
                S_saved[i, rows], z_saved[i, rows] = S, z
            block = load(call, tile, work)
            (S_ends, z_ends), b = states(block, S, z), len(S)
            _, q_in, A, d, _ = queries(block, z_ends[:-b])
            part = torch.bmm(A, block.v, out=work("y")).baddbmm_(q_in, S_ends[:-b])
            tile.write(y, part if d is None else part.div_(d))
            S, z = S_ends[-b:], z_ends[-b:]
        S_end[rows], z_end[rows] = S, z
    return results


def empty(call: CausalCall, save: bool) -> tuple[Tensor, ...]:
    """Return results without numbers, of a symbolic length too."""
    (*lead, f, dv), n, blocks = call.S.shape, call.q.shape[-2], 0
    if save:
        _, length, chunk = sizes(call)
        blocks = -(-(n // chunk * chunk) // length) - (-(n % chunk) // chunk)
    y = empty_like(call.v, (*call.q.shape[:-1], dv))
    saved = ((blocks, math.prod(lead), *shape) for shape in ((f, dv), (1, f)))
    return y, *(call.S.new_empty(shape) for shape in (call.S.shape, call.z.shape, *saved))


def sizes(call: CausalCall) -> tuple[int, int, int]:
    """Return (rows of the first dimension per block, tokens per block, tokens per chunk). A chunk is half the shorter
    side of a state, as a power of two from 16 to 64."""
    (rows, *others, n, _), chunk = call.q.shape, SHORTEST
    while chunk < min(LONGEST, min(call.S.shape[-2:]) / 2):
        chunk *= 2
    chunk, heads, block = min(chunk, max(1, n)), max(1, math.prod(others)), BLOCK // max(1, *call.S.shape[-2:])
    step = rows if call.S.shape[0] < rows else max(1, block // (max(1, min(n, SEGMENT)) * heads))
    return step, max(SEGMENT, block // (max(1, min(rows, step)) * heads)) // chunk * chunk, chunk


class Tile(NamedTuple):
    """The place of a block: rows of the first of `lead` dimensions, and some chunks of the tokens from `start` on."""

    rows: slice
    start: int
    number: int
    chunk: int
    lead: int

    def chunks(self, x: Tensor) -> Tensor:
        """View the chunks of x (*b *g n d) in front, (c *b *g C d)."""
        x = x[self.rows].narrow(-2, self.start, self.number * self.chunk)
        return x.unflatten(-2, (self.number, self.chunk)).movedim(-3, 0)

    def flat(self, x: Tensor) -> Tensor:
        """(c *b *g C d) as (cb gC d)"""
        return x.flatten(self.lead + 1, -2).flatten(0, self.lead)

    def write(self, total: Tensor, part: Tensor) -> None:
        """Write (cb gC d) to where it belongs in (*b *g n d)."""
        target = self.chunks(total)
        target.copy_(part.view_as(target))


def cut(call: CausalCall) -> list[tuple[slice, list[Tile]]]:
    """Cut the first dimension, unless its queries share a state, and the tokens into blocks that fit the cache. What is
    left of the tokens is a chunk of its own length. Return the states and the blocks of each part."""
    (rows, *others), n, (step, length, chunk) = call.S.shape[:-2], call.q.shape[-2], sizes(call)
    end, states, lead = n // chunk * chunk, math.prod(others), len(others) + 1
    cuts = [(start, min(length, end - start) // chunk, chunk, lead) for start in range(0, end, length)]
    cuts += [(end, 1, n - end, lead)] if end < n else []
    return [
        (slice(i * states, (i + step) * states), [Tile(slice(i, i + step), *each) for each in cuts])
        for i in range(0, rows, step)
    ]


def arrange(call: CausalCall, *outputs: Tensor) -> tuple[CausalCall, list[Tensor]]:
    """View q and outputs as (*b *g n d), k and v as (*b n d), mask and decays as (*b n 1), decays per channel as
    (*b n f), the state as (b f dv) and (b 1 f): leading dimensions whose queries share a state stand beside the
    tokens."""
    lead, beside = call.z.shape[:-1], [call.q, *outputs]
    for i, size in enumerate(lead):
        if size != call.q.shape[i]:
            beside = [x.unsqueeze(i).movedim(i + 1, -3) for x in beside]
    k, v, S, z = call.k.expand(*lead, -1, -1), call.v.expand(*lead, -1, -1), call.S, call.z.unsqueeze(-2)
    per_key = (x if x is None or x.ndim == k.ndim else x.unsqueeze(-1) for x in (call.log_decay, call.key_mask))
    log_decay, key_mask = (None if x is None else x.expand(*lead, -1, -1) for x in per_key)
    return CausalCall(beside[0], k, v, S.flatten(0, -3), z.flatten(0, -3), log_decay, key_mask, *call[7:]), beside[1:]


class Decay(NamedTuple):
    """Weights of a block's chunks: inside is D (cb 1 C C), since r and until w are (cb 1 C 1), over is a (c b 1 1).
    All are None where nothing decays."""

    inside: Tensor | None = None
    since: Tensor | None = None
    until: Tensor | None = None
    over: Tensor | None = None


class Block(NamedTuple):
    """Features and values of one block in the accumulation dtype: q (cb gC f), k (cb C f), v (cb C dv)."""

    q: Tensor
    k: Tensor
    v: Tensor
    missing: Tensor | None
    decay: Decay
    normalize: str | None
    nonnegative: bool
    tile: Tile
    work: Workspace


def load(call: CausalCall, tile: Tile, work: Workspace) -> Block:
    """Copy one block of a call, as `arrange` returns it, into the cache and apply φ."""
    phi, missing, decay = ELEMENTWISE[call.feature_map], None, Decay()
    q = tile.flat(work.features("q", tile.chunks(call.q), phi))
    k = tile.flat(work.features("k", tile.chunks(call.k), phi))
    v = tile.flat(work.features("v", tile.chunks(call.v), IDENTITY))
    if call.key_mask is not None:
        missing = ~tile.flat(tile.chunks(call.key_mask))
        k.masked_fill_(missing, 0)
        v.masked_fill_(missing, 0)
        # what a masked token holds, NaN too, must not reach the gradients of the keys that its query sees
        asking = q.unflatten(1, (-1, tile.chunk))
        asking.masked_fill_(missing.unsqueeze(1) & ~asking.sum(-1, keepdim=True).isfinite(), 0)
    if call.log_decay is not None:
        inside, since, until = decay_weights(tile.flat(tile.chunks(call.log_decay).to(k.dtype)))
        decay = Decay(inside, since, until, since[:, 0, -1:].unflatten(0, (tile.number, -1)))
    return Block(q, k, v, missing, decay, call.normalize, phi.nonnegative, tile, work)


def decay_weights(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what decays between tokens of chunks, (B 1 C C), since they began and until they end, (B 1 C 1), given
    (B C 1). Logarithms are summed in float64, so that differences of long sums stay exact; −inf starts a sequence."""
    log_decay, dtype = log_decay.mT, log_decay.dtype
    exact = torch.float32 if log_decay.device.type == "mps" else torch.float64
    fresh = log_decay == -torch.inf
    # on a CPU torch's exp2 takes a fifth of the time of exp
    total = log_decay.to(exact).masked_fill(fresh, 0).cumsum(-1).mul_(math.log2(math.e)).unsqueeze(-1)
    inside = (total - total.mT).to(dtype).exp2_().tril_()
    since, until = (x.to(dtype).exp2() for x in (total, total[..., -1:, :] - total))
    if log_decay.device.type != "cpu" or fresh.any():
        count = fresh.cumsum(-1).unsqueeze(-1)
        inside.mul_(count == count.mT)
        since.mul_(count == 0)
        until.mul_(count[..., -1:, :] == count)
    return inside, since, until


def states(block: Block, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states at the c + 1 ends of all chunks, S (cb+b f dv) and z (cb+b 1 f), from those that enter."""
    k, b = decayed(block.k, block.decay.until), len(S)
    S_ends, z_ends = (block.work(name, (len(k) + b, *x.shape[1:])) for name, x in (("S", S), ("z", z)))
    S_ends[:b], z_ends[:b] = S, z
    S_ends[b:].baddbmm_(k.mT, block.v, beta=0)
    torch.sum(k, 1, keepdim=True, out=z_ends[b:])
    scan(S_ends, block.tile, block.decay.over)
    scan(z_ends, block.tile, block.decay.over)
    return S_ends, z_ends


def scan(ends: Tensor, tile: Tile, over: Tensor | None, *, reverse: bool = False) -> None:
    """Scan over chunks in place: S_{c+1} = a_c S_c + ΔS_c. Runs backwards for gradients."""
    states = ends.unflatten(0, (tile.number + 1, -1)).unbind(0)
    weights = None if over is None else over.unbind(0)
    for i in reversed(range(tile.number)) if reverse else range(tile.number):
        done, following = (states[i + 1], states[i]) if reverse else (states[i], states[i + 1])
        following.add_(done) if weights is None else following.addcmul_(done, weights[i])


def decayed(x: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply queries or keys (cb gC d) by r or w."""
    return x if weight is None else (x.unflatten(1, (-1, weight.shape[2])) * weight).flatten(1, 2)


def weigh(A: Tensor, block: Block) -> Tensor:
    """A ∘ D, in place. What a query must not see is overwritten, not multiplied by zero: it may be infinite."""
    parts = A.unflatten(1, (-1, block.tile.chunk))
    if block.decay.inside is not None:
        parts.mul_(block.decay.inside)
    parts.tril_()
    return A


def weights(block: Block) -> Tensor:
    """D itself, (cb C C)."""
    inside, (count, C, _) = block.decay.inside, block.k.shape
    return block.k.new_ones(C, C).tril().expand(count, C, C) if inside is None else inside.squeeze(1)


def over_key_sums(x: Tensor, sums: Tensor) -> Tensor:
    """Divide queries (cb gC f) by the key sums (cb C f)."""
    return divide(x.unflatten(1, (-1, sums.shape[1])), sums.unsqueeze(1)).flatten(1, 2)


class Queries(NamedTuple):
    """Queries of a block as its keys and the states before its chunks meet them."""

    q: Tensor  # with "keys", over the key sums, (cb gC f)
    q_in: Tensor  # the same, decayed since the chunk began
    A: Tensor  # D ∘ q kᵀ, (cb gC C)
    d: Tensor | None  # the denominators of "output", (cb gC 1)
    key_sums: Tensor | None  # those of "keys", (cb C f): z_i, the sum of the keys that each query sees


def queries(block: Block, z_in: Tensor) -> Queries:
    q, d, key_sums = block.q, None, None
    if block.normalize == "keys":
        key_sums = decayed(z_in.expand_as(block.k), block.decay.since) + weights(block) @ block.k
        q = over_key_sums(q, key_sums)
    A, q_in = weigh(torch.bmm(q, block.k.mT, out=block.work("A")), block), decayed(q, block.decay.since)
    if block.normalize == "output":
        # as a matrix product, q·z would take half the time of a full one
        d = A.sum(-1, keepdim=True).add_(torch.mul(q_in, z_in, out=block.work("scratch")).sum(-1, keepdim=True))
        d = infinite_if_none(d, nonnegative=block.nonnegative)
    return Queries(q, q_in, A, d, key_sums)
