"""Blocks of the sequence, small enough for the cache, as the chunked form loads and writes them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.backends.base import CausalCall
from linattn.ops.backends.memory import Workspace
from linattn.ops.elementwise import ELEMENTWISE

# half of A is thrown away, so short chunks save products; their states, one per chunk, cost memory traffic
SHORTEST, LONGEST = 16, 64
# a block's keys or values are a megabyte in float32; blocks of fewer tokens would save a state too often
BLOCK, SEGMENT = 2**18, 256


class Decay(NamedTuple):
    """Weights of a block's chunks: inside is D (cb 1 C C), since r and until w (cb 1 C 1), whole a (c b 1 1)."""

    inside: Tensor
    since: Tensor
    until: Tensor
    whole: Tensor


class Tile(NamedTuple):
    """The place of a block: some of the first dimension, and the tokens from `start` to `stop`, in chunks of `chunk`.
    `shared` are the leading dimensions of queries that share a key and so a state."""

    rows: slice
    start: int
    stop: int
    chunk: int
    shared: list[int]

    @property
    def chunks(self) -> int:
        return (self.stop - self.start) // self.chunk


class Block(NamedTuple):
    """Features and values of one block in the accumulation dtype. Its c chunks of b sequences stand one after another
    in memory, so that every product is one of three-dimensional batches: k (cb C f), v (cb C dv), and q (cb gC f) with
    the g queries that share a key."""

    q: Tensor
    k: Tensor
    v: Tensor
    chunks: int
    nonnegative: bool
    missing: Tensor | None
    decay: Decay | None


def rows_of(x: Tensor, rows: slice) -> Tensor:
    """A first dimension of size 1 serves all rows."""
    return x if x.shape[0] == 1 else x[rows]


def chunk_length(call: CausalCall) -> int:
    """Return half the shorter side of a state, as a power of two from 16 to 64."""
    length = SHORTEST
    while length < min(LONGEST, min(call.S.shape[-2:]) / 2):
        length *= 2
    return min(length, max(1, call.q.shape[-2]))


def sizes(call: CausalCall) -> tuple[int, int, int]:
    """Return (rows of the first dimension per block, tokens per block, tokens per chunk)."""
    *others, n, _ = call.q.shape[1:]
    rows = max(call.q.shape[0], call.S.shape[0])
    chunk, heads = chunk_length(call), max(1, math.prod(others))
    block = BLOCK // max(1, *call.S.shape[-2:])
    step = rows if call.S.shape[0] < rows else max(1, block // (max(1, min(n, SEGMENT)) * heads))
    return step, max(SEGMENT, block // max(1, min(rows, step) * heads)) // chunk * chunk or chunk, chunk


def number_of_blocks(call: CausalCall) -> int:
    """Return the number of blocks per sequence. Works with a symbolic length."""
    n, (_, length, chunk) = call.q.shape[-2], sizes(call)
    return -(-(n // chunk * chunk) // length) - (-(n % chunk) // chunk)


def cut(call: CausalCall) -> list[tuple[slice, list[Tile]]]:
    """Cuts the first dimension, unless its queries share a state, and the tokens into blocks that fit the cache. What
    is left of the tokens is a chunk of its own length."""
    n, rows = call.q.shape[-2], max(call.q.shape[0], call.S.shape[0])
    step, length, chunk = sizes(call)
    whole = n // chunk * chunk
    cuts = [(start, min(start + length, whole), chunk) for start in range(0, whole, length)]
    if whole < n:
        cuts.append((whole, n, n - whole))
    shared = [i for i, (a, b) in enumerate(zip(call.q.shape[:-2], call.S.shape[:-2], strict=True)) if a != b]
    plan = []
    for part in (slice(first, first + step) for first in range(0, rows, step)):
        plan.append((part, [Tile(part, *cut, shared) for cut in cuts]))
    return plan


def chunks(x: Tensor, tile: Tile) -> Tensor:
    """The tile's chunks of x (…, n, d) in front, (c … C d), without a copy."""
    x = rows_of(x, tile.rows).narrow(-2, tile.start, tile.stop - tile.start)
    return x.unflatten(-2, (-1, tile.chunk)).movedim(-3, 0)


def queries_last(x: Tensor, tile: Tile) -> Tensor:
    """(c … C d) with the shared leading dimensions moved to the chunk's tokens."""
    if not tile.shared:
        return x
    return x.movedim([1 + i for i in tile.shared], [i - len(tile.shared) - 2 for i in range(len(tile.shared))])


def of_keys(x: Tensor, tile: Tile, work: Workspace, name: str) -> Tensor:
    """(cb C d)"""
    return work.copy(name, chunks(x, tile)).flatten(0, -3)


def of_queries(x: Tensor, tile: Tile, work: Workspace, name: str) -> Tensor:
    """(cb gC d)"""
    x = work.copy(name, queries_last(chunks(x, tile), tile))
    return x.flatten(0, -3 - len(tile.shared)).flatten(1, -2)


def spread_keys(call: CausalCall) -> CausalCall:
    """Expand what belongs to keys to all leading dimensions of the states, without a copy."""

    def spread(x: Tensor) -> Tensor:
        return x.expand(*call.S.shape[:-2], *x.shape[-2:])

    log_decay, key_mask = (None if x is None else spread(x.unsqueeze(-1)) for x in (call.log_decay, call.key_mask))
    return call._replace(k=spread(call.k), v=spread(call.v), log_decay=log_decay, key_mask=key_mask)


def decay_weights(log_decay: Tensor, chunks: int) -> Decay:
    """Sum logarithms in float64, so that differences of long sums stay exact; each −inf starts a sequence."""
    exact = torch.float32 if log_decay.device.type == "mps" else torch.float64
    fresh = log_decay == -torch.inf
    total, count = log_decay.to(exact).masked_fill(fresh, 0).cumsum(-1), fresh.cumsum(-1)
    same = (count.unsqueeze(-1) == count.unsqueeze(-2)).tril_()
    inside = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~same, -torch.inf)
    since = total.masked_fill(count > 0, -torch.inf)
    until = (total[..., -1:] - total).masked_fill(count[..., -1:] != count, -torch.inf)
    inside, since, until = (x.to(log_decay.dtype).exp().unsqueeze(1) for x in (inside, since, until))
    whole = since[..., -1].unflatten(0, (chunks, -1)).unsqueeze(-1)
    return Decay(inside, since.unsqueeze(-1), until.unsqueeze(-1), whole)


def load(call: CausalCall, tile: Tile, work: Workspace) -> Block:
    """Copy one block of a call, which went through `spread_keys`, into the cache and apply φ."""
    phi, nonnegative = ELEMENTWISE[call.feature_map].overwrite, ELEMENTWISE[call.feature_map].nonnegative
    q, k = (phi(x, work.scratch(x)) for x in (of_queries(call.q, tile, work, "q"), of_keys(call.k, tile, work, "k")))
    v = of_keys(call.v, tile, work, "v")
    decay, missing = None, None
    if call.key_mask is not None:
        missing = ~chunks(call.key_mask, tile).flatten(0, -3)
        k.masked_fill_(missing, 0)
        v.masked_fill_(missing, 0)
        # what a masked token holds, NaN too, must not reach the gradients of the keys that its query sees
        asking = q.unflatten(1, (-1, tile.chunk))
        asking.masked_fill_(missing.unsqueeze(1) & ~asking.sum(-1, keepdim=True).isfinite(), 0)
    if call.log_decay is not None:
        log_decay = chunks(call.log_decay, tile).to(k.dtype).flatten(0, -3).squeeze(-1)
        decay = decay_weights(log_decay, tile.chunks)
    return Block(q, k, v, tile.chunks, nonnegative, missing, decay)


def write(total: Tensor, tile: Tile, part: Tensor) -> None:
    """A block's outputs or gradients of its queries (cb gC d), to where they belong."""
    target = queries_last(chunks(total, tile), tile)
    target.copy_(part.view_as(target))


def write_keys(total: Tensor, tile: Tile, part: Tensor, block: Block, call: CausalCall) -> None:
    """A block's gradients of its keys (cb C d), to where they belong; what was broadcast is summed."""
    if block.missing is not None:
        part = part.masked_fill(block.missing, 0)
    target, lead = chunks(total, tile), rows_of(call.z, tile.rows).shape[:-1]
    part = part.view(tile.chunks, *lead, *part.shape[-2:]).sum_to_size(*target.shape)
    target.add_(part) if total.shape[0] == 1 and tile.rows.start > 0 else target.copy_(part)
