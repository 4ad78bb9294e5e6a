"""The blocks of all chunked forms: a sequence is cut into chunks of C tokens, and as many chunks as the processor's
cache holds are one block. Blocks are computed one after another; in a block, each step is one operation on all chunks.
Shapes: *b are the leading dimensions of states, *g those in which several queries share a state; a block has c chunks
of b sequences, as one batch cb.

Chunks i = 1, 2, … of a block are joined by their states, S_{i+1} = a_i S_i + ΔS_i, which `scan` adds up. The products
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

# numbers of a block's keys, values or states: a megabyte in float32, which stays in the cache
BLOCK = 2**18
# half of the products inside a chunk is discarded, so short chunks save products; each chunk has a state, which costs
# memory traffic
SHORTEST_CHUNK = 16
# bytes from which on a tensor lies in pages of 2 MiB
LARGE = 8 * 2**20
_PAGE, _MADV_HUGEPAGE = 4096, 14


class Workspace:
    """Scratch tensors in the dtype and on the device of x. `work(name, shape)` returns uninitialized memory, which all
    calls with this name share, so that it stays in the cache; without a shape, an empty tensor for `out=`."""

    def __init__(self, x: Tensor):
        self._x = x
        self._tensors: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...] = (0,)) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._x.new_empty(0)
        # a smaller shape keeps the memory
        return self._tensors[name].resize_(shape)

    def features(self, name: str, x: Tensor, phi: Elementwise) -> Tensor:
        """Return φ(x) in the scratch tensor `name`; x stays as it is."""
        x = self(name, x.shape).copy_(x)
        return x if phi.derivative is None else phi.overwrite(x, self("scratch", x.shape))

    def map_gradient(self, gradient: Tensor, features: Tensor, phi: Elementwise) -> Tensor:
        """Turn `gradient`, that of the `features` φ(x), into the gradient of x, in place."""
        if phi.derivative is None:
            return gradient
        return gradient.mul_(phi.derivative(features, self("scratch", features.shape)))


def empty_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `x.new_empty(shape)`. Large tensors lie in large pages, which a program has to request from Linux."""
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
    """The part of a call that one block computes. In tensors of tokens it is the slice `rows` of the first dimension,
    and `number` chunks of `tokens` tokens each from token `start` on; zeros fill up each chunk to C = `chunk` tokens.
    In tensors of states, whose `lead` leading dimensions are flattened, it is the slice `states`. The block is number
    `position` of those with the same rows."""

    position: int
    rows: slice
    states: slice
    start: int
    number: int
    tokens: int
    chunk: int
    lead: int

    def chunks(self, x: Tensor) -> Tensor:
        """Return the block's chunks of x (*b *g n d), filled up with zeros, with the chunks in front: (c *b *g C d)."""
        x = x[self.rows].narrow(-2, self.start, self.number * self.tokens)
        x = F.pad(x, (0, 0, 0, self.chunk - self.tokens)) if self.chunk > self.tokens else x
        return x.unflatten(-2, (self.number, self.chunk)).movedim(-3, 0)

    def load(self, x: Tensor, name: str, work: Workspace, phi: Elementwise = ELEMENTWISE["identity"]) -> Tensor:
        """Return φ of the block's chunks of x (*b *g n d), as (cb gC d), in the tensor `name` of `work`."""
        return work.features(name, self.chunks(x), phi).flatten(self.lead + 1, -2).flatten(0, self.lead)

    def write(self, total: Tensor, *parts: Tensor, combine: Callable[..., Tensor] | None = None) -> None:
        """Write one part (cb gC d), or what `combine` makes of several, to the block's tokens of `total`, which is a
        tensor of all tokens (*b *g n d)."""
        target = total[self.rows].narrow(-2, self.start, self.number * self.tokens)
        target = target.unflatten(-2, (self.number, self.tokens)).movedim(-3, 0)
        lead = *target.shape[:-2], self.chunk
        views = [x.reshape(*lead, x.shape[-1]).narrow(-2, 0, self.tokens) for x in parts]
        # not every device casts what it writes into `out`
        if combine is not None and target.dtype == views[0].dtype:
            combine(*views, out=target)
        else:
            target.copy_(views[0] if combine is None else combine(*views))

    def per_chunk(self, x: Tensor) -> Tensor:
        """View (cb …) as (c b …)."""
        return x.unflatten(0, (self.number, x.shape[0] // self.number))


class Sizes(NamedTuple):
    """Sizes of a call's blocks: `rows` entries of the first dimension times `length` tokens, a multiple of `chunk`, the
    tokens per chunk. The last block may have fewer chunks; the n mod `chunk` tokens that are left are a block of one
    short chunk, which zeros fill up to a power of two of tokens if `padded`."""

    rows: int
    length: int
    chunk: int
    padded: bool

    @classmethod
    def fit(cls, q: Tensor, S: Tensor, *, longest: int, segment: int, padded: bool) -> "Sizes":
        """Choose sizes for queries (*lead n d) and states S (*lead d dv), so that a block fits the cache, but
        `segment` tokens of a sequence at least. A chunk has half as many tokens as the shorter side of a state, as a
        power of two from 16 to `longest`. A first dimension in which queries share a state is not cut."""
        (*lead, n, _), (d, dv), chunk = q.shape, S.shape[-2:], SHORTEST_CHUNK
        while chunk < min(longest, min(d, dv) / 2):
            chunk *= 2
        rows = S.shape[0]
        tokens = BLOCK // max(1, math.prod(lead) // max(1, rows) * max(d, dv))
        step = max(1, min(rows, tokens // max(1, min(n, segment))))
        return cls(step, max(segment, tokens // step) // chunk * chunk, chunk, padded)

    def count(self, n: int) -> int:
        """Return the number of blocks in a sequence of n tokens. Works with a symbolic length."""
        return -(-(n // self.chunk * self.chunk) // self.length) - (-(n % self.chunk) // self.chunk)

    def places(self, lead: Sequence[int], n: int) -> list[Place]:
        """Return where each block of a call lies in its sequences and states. The call has n tokens and states of the
        leading dimensions `lead`. Every block comes after the earlier blocks of its sequences; a gradient takes them in
        reverse."""
        (rows, *others), C, end = lead, self.chunk, n // self.chunk * self.chunk
        states, rest = math.prod(others), n - end
        cuts = [(start, min(self.length, end - start) // C, C, C) for start in range(0, end, self.length)]
        cuts += [(end, 1, rest, 1 << (rest - 1).bit_length() if self.padded else rest)] if rest else []
        return [
            Place(i, slice(r, r + self.rows), slice(r * states, (r + self.rows) * states), *cut, len(others) + 1)
            for r in range(0, rows, self.rows)
            for i, cut in enumerate(cuts)
        ]


def group_view(x: Tensor, states: Sequence[int], queries: Sequence[int]) -> Tensor:
    """View x (*lead n d) as (*b *g n d). Where the sizes of leading dimensions of `states` and `queries` differ,
    several queries share a state, or several states a query: this dimension of x moves to the front of the tokens, as
    one of the groups *g, and leaves one of size 1."""
    for i, (size, count) in enumerate(zip(states, queries, strict=False)):
        if size != count:
            x = x.unsqueeze(i).movedim(i + 1, -3)
    return x


def scan(states: Tensor, place: Place, decay: Tensor | None, *, reverse: bool = False) -> None:
    """Compute the states at the c + 1 ends of a block's chunks, S_{i+1} = a_i S_i + ΔS_i with a = `decay` (c b …), in
    place: `states` (cb+b …) hold the first state, then the sum ΔS_i of each chunk. In reverse, for gradients, they hold
    the sums, then the last state: S_i = a_i S_{i+1} + ΔS_i."""
    ends = states.unflatten(0, (place.number + 1, -1)).unbind(0)
    weights = None if decay is None else decay.unbind(0)
    for i in reversed(range(place.number)) if reverse else range(place.number):
        source, target = (ends[i + 1], ends[i]) if reverse else (ends[i], ends[i + 1])
        target.add_(source) if weights is None else target.addcmul_(source, weights[i])
