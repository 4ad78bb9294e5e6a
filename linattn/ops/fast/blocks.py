"""Blocks of a call that fit the cache, of chunks that are one matrix product each, and memory for loops over them.

Fresh memory costs time: it is not in the cache, and a CPU faults in each page of it when it is first written, four
times as slow as the writing itself. Here both are avoided where the system lets us."""

import ctypes
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from linattn.ops.elementwise import ELEMENTWISE, Elementwise

# tensors from here on are asked to be in pages of 2 MiB
LARGE = 8 * 2**20
_PAGE, _MADV_HUGEPAGE = 4096, 14


class Workspace:
    """Scratch tensors by name, in the dtype and on the device of x, that stay in the cache because they are used again.
    Taking a name invalidates what it held. Without a shape it is empty, for an operation's `out`, which resizes it."""

    def __init__(self, x: Tensor):
        self._x = x
        self._tensors: dict[str, Tensor] = {}
        self._apart: dict[str, Workspace] = {}

    def __call__(self, name: str, shape: tuple[int, ...] = (0,)) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._x.new_empty(0)
        # a smaller shape keeps the memory
        return self._tensors[name].resize_(shape)

    def apart(self, name: str) -> "Workspace":
        """Return the workspace of this name inside this one."""
        return self._apart.setdefault(name, Workspace(self._x))

    def features(self, name: str, x: Tensor, phi: Elementwise) -> Tensor:
        """Return φ of a copy of x."""
        x = self(name, x.shape).copy_(x)
        return x if phi.derivative is None else phi.overwrite(x, self("scratch", x.shape))

    def through_map(self, gradient: Tensor, features: Tensor, phi: Elementwise) -> Tensor:
        """Turn the gradient of φ(x) into that of x by the chain rule, in place."""
        if phi.derivative is None:
            return gradient
        return gradient.mul_(phi.derivative(features, self("scratch", features.shape)))


def empty_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `x.new_empty(shape)`, in large pages if it is large: Linux gives them to programs that request them."""
    y = x.new_empty(shape)
    # fake tensors have no memory
    if sys.platform == "linux" and type(y) is Tensor and y.device.type == "cpu" and y.nbytes >= LARGE:
        # advice that is refused changes nothing
        start = -(-y.data_ptr() // _PAGE) * _PAGE
        length = (y.data_ptr() + y.nbytes - start) // _PAGE * _PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return y


class Place(NamedTuple):
    """Rows of the first of `lead` dimensions, and a `number` of chunks of tokens from `start` on: so many of them are
    `present`, and zeros fill the chunk up."""

    rows: slice
    start: int
    number: int
    present: int
    chunk: int
    lead: int

    def chunks(self, x: Tensor) -> Tensor:
        """View the chunks of x (*b *g n d) in front, (c *b *g C d)."""
        x = x[self.rows].narrow(-2, self.start, self.number * self.present)
        x = F.pad(x, (0, 0, 0, self.chunk - self.present)) if self.chunk > self.present else x
        return x.unflatten(-2, (self.number, self.chunk)).movedim(-3, 0)

    def load(self, x: Tensor, name: str, work: Workspace, phi: Elementwise = ELEMENTWISE["identity"]) -> Tensor:
        """Copy φ of the chunks of x (*b *g n d) as (cb gC d)."""
        return work.features(name, self.chunks(x), phi).flatten(self.lead + 1, -2).flatten(0, self.lead)

    def write(self, total: Tensor, *parts: Tensor, by: Callable[..., Tensor] | None = None) -> None:
        """Write (cb gC d), or the result `by` an operation on several, to where it belongs in (*b *g n d)."""
        target = total[self.rows].narrow(-2, self.start, self.number * self.present)
        target = target.unflatten(-2, (self.number, self.present)).movedim(-3, 0)
        lead = *target.shape[:-2], self.chunk
        views = [x.reshape(*lead, x.shape[-1]).narrow(-2, 0, self.present) for x in parts]
        # not every device casts what it writes into `out`
        if by is not None and target.dtype == views[0].dtype:
            by(*views, out=target)
        else:
            target.copy_(views[0] if by is None else by(*views))

    def each(self, x: Tensor) -> Sequence[Tensor]:
        """Return the part of each chunk, (b …), of (cb …)."""
        return x.unflatten(0, (self.number, x.shape[0] // self.number)).unbind(0)


class Sizes(NamedTuple):
    """Rows of the first dimension per block, tokens per block, a multiple of those per chunk, and tokens per chunk.
    What is left of the tokens is a chunk of its own, `filled` up to a power of two of tokens or not."""

    rows: int
    length: int
    chunk: int
    filled: bool

    def count(self, n: int) -> int:
        """Return the number of blocks of n tokens. Works with a symbolic length."""
        return -(-(n // self.chunk * self.chunk) // self.length) - (-(n % self.chunk) // self.chunk)

    def cut(self, lead: Sequence[int], n: int) -> list[tuple[slice, list[Place]]]:
        """Cut the first dimension of states (*lead d dv), and n tokens. Return the states and the blocks of each part
        of the rows."""
        (rows, *others), C, end = lead or (1,), self.chunk, n // self.chunk * self.chunk
        states, rest = math.prod(others), n - end
        cuts = [(start, min(self.length, end - start) // C, C, C) for start in range(0, end, self.length)]
        cuts += [(end, 1, rest, 1 << (rest - 1).bit_length() if self.filled else rest)] if rest else []
        parts = [slice(i, i + self.rows) for i in range(0, rows, self.rows)]
        return [
            (slice(part.start * states, part.stop * states), [Place(part, *each, len(others) + 1) for each in cuts])
            for part in parts
        ]


def beside_tokens(x: Tensor, sizes: Iterable[int], others: Iterable[int]) -> Tensor:
    """View (*lead n d) as (*b *g n d): leading dimensions whose `sizes` are not those of `others` stand beside the
    tokens."""
    for i, (size, other) in enumerate(zip(sizes, others, strict=False)):
        if size != other:
            x = x.unsqueeze(i).movedim(i + 1, -3)
    return x
