"""Cuts of the delta rule's tensors for its chunked form: rows of the first dimension, and segments of tokens whose keys
fit the cache, of chunks that are one matrix product each."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from linattn.ops.backends.delta.call import DeltaCall

# half of the products inside a chunk is thrown away, so short chunks save work; their states cost memory traffic
SHORTEST, LONGEST = 16, 32
# numbers of a segment's keys or values: a megabyte in float32; segments of fewer tokens would save a state too often
BLOCK, SEGMENT = 2**18, 64


class Place(NamedTuple):
    """Rows of the first of `lead` dimensions, and some chunks of tokens, the last filled up with zeros if need be."""

    rows: slice
    start: int
    length: int
    chunk: int
    lead: int

    @property
    def number(self) -> int:
        return -(-self.length // self.chunk)

    def tokens(self, x: Tensor) -> Tensor:
        return x[self.rows].narrow(-2, self.start, self.length)

    def cut(self, x: Tensor) -> Tensor:
        """View the chunks of (*b *g n d) in front, (c *b *g C d)."""
        x, missing = self.tokens(x), self.number * self.chunk - self.length
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        return x.unflatten(-2, (self.number, self.chunk)).movedim(-3, 0)

    def write(self, total: Tensor, part: Tensor) -> None:
        """Write (B gC d) to where it belongs in (*b *g n d)."""
        each = self.length // self.number
        target = self.tokens(total).unflatten(-2, (self.number, each)).movedim(-3, 0)
        target.copy_(part.reshape(*target.shape[:-2], self.chunk, part.shape[-1]).narrow(-2, 0, each))

    def chunks(self, x: Tensor) -> Sequence[Tensor]:
        """Return the part of each chunk, (b …), of (cb …)."""
        return x.unflatten(0, (self.number, x.shape[0] // self.number)).unbind(0)


def sizes(call: DeltaCall) -> tuple[int, int, int]:
    """Return (rows of the first dimension per segment, tokens per segment, tokens per chunk)."""
    *lead, d, dv = call.S.shape
    rows, chunk = lead[0] if lead else 1, SHORTEST if min(d, dv) <= LONGEST else LONGEST
    block = BLOCK // max(1, math.prod(call.q.shape[:-2]) // max(1, rows) * max(d, dv))
    step = max(1, min(rows, block // SEGMENT))
    return step, max(SEGMENT, block // step // SEGMENT * SEGMENT), chunk


def number_of_segments(call: DeltaCall) -> int:
    """Return the number of segments per sequence. Works with a symbolic length."""
    n, (_, length, chunk) = call.q.shape[-2], sizes(call)
    return -(-(n // chunk * chunk) // length) - (-(n % chunk) // chunk)


def cut(call: DeltaCall) -> list[tuple[slice, list[Place]]]:
    """Cut the first dimension and the tokens. What is left of the tokens is a chunk of its own, of a power of two of
    tokens. Return the states and the segments of each part of the rows."""
    (*lead, _, _), n, (step, length, chunk) = call.S.shape, call.q.shape[-2], sizes(call)
    rows, *others = lead or [1]
    end, states = n // chunk * chunk, math.prod(others)
    cuts = [(start, min(length, end - start), chunk, len(others) + 1) for start in range(0, end, length)]
    cuts += [(end, n - end, 1 << (n - end - 1).bit_length(), len(others) + 1)] if end < n else []
    return [
        (slice(i * states, (i + step) * states), [Place(slice(i, i + step), *each) for each in cuts])
        for i in range(0, rows, step)
    ]


def arrange(call: DeltaCall, *outputs: Tensor) -> tuple[DeltaCall, list[Tensor]]:
    """View q and outputs as (*b *g n d), what belongs to keys as (*b n d), and the states as (b d dv), with one leading
    dimension at least: those whose queries share a state stand beside the tokens."""
    lead, beside = call.S.shape[:-2] or (1,), [call.q, *outputs]
    if call.S.ndim == 2:
        beside = [x.unsqueeze(0) for x in beside]
    for i, size in enumerate(lead):
        if size != beside[0].shape[i]:
            beside = [x.unsqueeze(i).movedim(i + 1, -3) for x in beside]
    k, v, beta = (spread(x, lead) for x in (call.k, call.v, call.beta))
    log_decay = None if call.log_decay is None else spread(call.log_decay, lead)
    return DeltaCall(beside[0], k, v, beta, call.S.reshape(math.prod(lead), *call.S.shape[-2:]), log_decay), beside[1:]


def spread(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    return x.expand(*lead, *x.shape[-2:])
