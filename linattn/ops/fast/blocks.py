"""The blocks of all chunked forms: a sequence is cut into chunks of C tokens, and as many chunks as the cache holds are
one block. Blocks are computed one after another; within a block each step is one operation on all of its chunks.

Chunks c = 1, 2, … of a block are joined by their states, S_{c+1} = a_c S_c + ΔS_c, which `scan` adds up. The products
inside chunks need no state.

New memory costs time: it is not in the cache, and a CPU faults in each page when it is first written, which takes four
times as long as the writing itself. So a `Workspace` uses the same memory for every block, and large results lie in
large pages."""

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from linattn.ops.elementwise import ELEMENTWISE, Elementwise
from linattn.ops.numerics import accumulator

# numbers of a block's keys, values or states: a megabyte in float32
BLOCK = 2**18
# half of the products inside a chunk is discarded, so short chunks save products; each chunk has a state, which costs
# memory traffic
SHORTEST_CHUNK = 16
# bytes from which on a tensor lies in pages of 2 MiB
LARGE = 8 * 2**20
_PAGE, _MADV_HUGEPAGE = 4096, 14


class Workspace:
    """Named scratch tensors in the dtype and on the device of x. A name's memory stays in the cache, because each use
    of the name overwrites it. A name without a shape is an empty tensor for `out=`, which resizes it."""

    def __init__(self, x: Tensor):
        self._x = x
        self._tensors: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...] = (0,)) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._x.new_empty(0)
        # a smaller shape keeps the memory
        return self._tensors[name].resize_(shape)

    def features(self, name: str, x: Tensor, phi: Elementwise) -> Tensor:
        """Return φ of a copy of x."""
        x = self(name, x.shape).copy_(x)
        return x if phi.derivative is None else phi.overwrite(x, self("scratch", x.shape))

    def map_gradient(self, gradient: Tensor, features: Tensor, phi: Elementwise) -> Tensor:
        """Turn the gradient of φ(x) into that of x, in place: multiply it by the derivative of φ at `features` φ(x)."""
        if phi.derivative is None:
            return gradient
        return gradient.mul_(phi.derivative(features, self("scratch", features.shape)))


def empty_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `x.new_empty(shape)`. Large tensors lie in large pages, which Linux gives to programs that request
    them."""
    y = x.new_empty(shape)
    # fake tensors have no memory
    if sys.platform == "linux" and type(y) is Tensor and y.device.type == "cpu" and y.nbytes >= LARGE:
        # if the system refuses, nothing changes
        start = -(-y.data_ptr() // _PAGE) * _PAGE
        length = (y.data_ptr() + y.nbytes - start) // _PAGE * _PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return y


def gradient_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return uninitialized memory for the gradient of x broadcast to `shape`: in the dtype of x, or, if it will be
    summed to the shape of x, in the accumulation dtype."""
    return empty_like(x if x.shape == shape else x.new_empty(0, dtype=accumulator(x.dtype)), shape)


class Place(NamedTuple):
    """The place of one block in a call. `rows` is its slice of the first of the `lead` dimensions, `position` its index
    among the blocks of these rows, `states` the slice of their states. It has `number` chunks of `tokens` tokens each,
    from token `start` on. Zeros fill up each chunk to `chunk` tokens."""

    position: int
    rows: slice
    states: slice
    start: int
    number: int
    tokens: int
    chunk: int
    lead: int

    def chunks(self, x: Tensor) -> Tensor:
        """View the block's chunks of x (*b *g n d), with the chunks in front: (c *b *g C d)."""
        x = x[self.rows].narrow(-2, self.start, self.number * self.tokens)
        x = F.pad(x, (0, 0, 0, self.chunk - self.tokens)) if self.chunk > self.tokens else x
        return x.unflatten(-2, (self.number, self.chunk)).movedim(-3, 0)

    def load(self, x: Tensor, name: str, work: Workspace, phi: Elementwise = ELEMENTWISE["identity"]) -> Tensor:
        """Copy φ of the block's chunks of x (*b *g n d) as (cb gC d)."""
        return work.features(name, self.chunks(x), phi).flatten(self.lead + 1, -2).flatten(0, self.lead)

    def write(self, total: Tensor, *parts: Tensor, by: Callable[..., Tensor] | None = None) -> None:
        """Write a part (cb gC d), or the result of the operation `by` on several such parts, to the block's tokens of
        `total` (*b *g n d)."""
        target = total[self.rows].narrow(-2, self.start, self.number * self.tokens)
        target = target.unflatten(-2, (self.number, self.tokens)).movedim(-3, 0)
        lead = *target.shape[:-2], self.chunk
        views = [x.reshape(*lead, x.shape[-1]).narrow(-2, 0, self.tokens) for x in parts]
        # not every device casts what it writes into `out`
        if by is not None and target.dtype == views[0].dtype:
            by(*views, out=target)
        else:
            target.copy_(views[0] if by is None else by(*views))

    def per_chunk(self, x: Tensor) -> Tensor:
        """View (cb …) as (c b …)."""
        return x.unflatten(0, (self.number, x.shape[0] // self.number))


class Sizes(NamedTuple):
    """Sizes of blocks: `rows` of the first dimension, `length` tokens and `chunk` tokens per chunk. A block's length is
    a multiple of the chunk. The rest of a sequence is one shorter chunk; if `padded`, zeros fill it up to a power of
    two of tokens."""

    rows: int
    length: int
    chunk: int
    padded: bool

    @classmethod
    def fit(cls, q: Tensor, S: Tensor, *, longest: int, segment: int, padded: bool) -> "Sizes":
        """Choose sizes for queries (*lead n d) and states (*lead d dv), so that a block fits the cache but has
        `segment` tokens at least. A chunk is half the shorter side of a state, as a power of two from 16 to `longest`.
        Where a state is shared by queries of the first dimension, that dimension is not cut."""
        (*lead, n, _), (d, dv), chunk = q.shape, S.shape[-2:], SHORTEST_CHUNK
        while chunk < min(longest, min(d, dv) / 2):
            chunk *= 2
        rows = S.shape[0] if lead else 1
        tokens = BLOCK // max(1, math.prod(lead) // max(1, rows) * max(d, dv))
        step = max(1, min(rows, tokens // max(1, min(n, segment))))
        return cls(step, max(segment, tokens // step) // chunk * chunk, chunk, padded)

    def count(self, n: int) -> int:
        """Return the number of blocks of n tokens. Works with a symbolic length."""
        return -(-(n // self.chunk * self.chunk) // self.length) - (-(n % self.chunk) // self.chunk)

    def places(self, lead: Sequence[int], n: int) -> list[Place]:
        """Return the places of all blocks, which cut n tokens and the first of the states' leading dimensions. Every
        block comes after the earlier blocks of its sequences; a gradient takes them in reverse."""
        (rows, *others), C, end = lead or (1,), self.chunk, n // self.chunk * self.chunk
        states, rest = math.prod(others), n - end
        cuts = [(start, min(self.length, end - start) // C, C, C) for start in range(0, end, self.length)]
        cuts += [(end, 1, rest, 1 << (rest - 1).bit_length() if self.padded else rest)] if rest else []
        return [
            Place(i, slice(r, r + self.rows), slice(r * states, (r + self.rows) * states), *cut, len(others) + 1)
            for r in range(0, rows, self.rows)
            for i, cut in enumerate(cuts)
        ]


def group_view(x: Tensor, lead: Sequence[int], other: Sequence[int]) -> Tensor:
    """View x (*b n d) as (*b *g n d). `lead` are the sizes of the leading dimensions of states, `other` those of
    queries. Each dimension in which they differ moves to the front of the tokens, as one of the groups *g, and leaves
    one of size 1 in its place: several queries share a state there, or several states a query."""
    for i, (size, count) in enumerate(zip(lead, other, strict=False)):
        if size != count:
            x = x.unsqueeze(i).movedim(i + 1, -3)
    return x


def scan(states: Tensor, place: Place, decay: Tensor | None, *, reverse: bool = False) -> None:
    """Turn `states`, the first state of a block and then the sums ΔS_c of its c chunks, each for b sequences (cb+b …),
    into the states at the starts and ends of chunks, in place: S_{c+1} = a_c S_c + ΔS_c, with a as `decay` (c b …). In
    reverse, for gradients, `states` are the sums and then the last state: S_c = a_c S_{c+1} + ΔS_c."""
    ends = states.unflatten(0, (place.number + 1, -1)).unbind(0)
    weights = None if decay is None else decay.unbind(0)
    for i in reversed(range(place.number)) if reverse else range(place.number):
        source, target = (ends[i + 1], ends[i]) if reverse else (ends[i], ends[i + 1])
        target.add_(source) if weights is None else target.addcmul_(source, weights[i])
