"""Fresh memory costs time: it is not in the cache, and a CPU faults in each page of it when it is first written, four
times as slow as the writing itself. Here both are avoided where the system lets us."""

import ctypes
import math
import sys

import torch
from torch import Tensor

# tensors from here on are asked to be in pages of 2 MiB
LARGE = 8 * 2**20
_PAGE, _MADV_HUGEPAGE = 4096, 14


class Workspace:
    """Scratch tensors by name, in the dtype and on the device of x, that stay in the cache because they are used again.
    Taking a name invalidates what it held."""

    def __init__(self, x: Tensor):
        self._x = x
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str | int, ...], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        if torch.compiler.is_compiling():
            return self._x.new_empty(shape)
        view = self._views.get((name, *shape))
        if view is None:
            buffer, size = self._buffers.get(name), math.prod(shape)
            if buffer is None or buffer.numel() < size:
                buffer = self._buffers[name] = self._x.new_empty(size)
            view = self._views[name, *shape] = buffer[:size].view(shape)
        return view

    def copy(self, name: str, x: Tensor) -> Tensor:
        return self(name, *x.shape).copy_(x)

    def scratch(self, x: Tensor) -> Tensor | None:
        """For the `out` of the next operation, in the shape of x. None for a compiler: its graph may need a gradient,
        which writing to a given place has not."""
        return None if torch.compiler.is_compiling() else self("scratch", *x.shape)


def empty_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x.new_empty(shape)`, in large pages if it is large: Linux gives them to programs that request them."""
    y = x.new_empty(shape)
    # a compiler plans the memory itself, and fake tensors have none
    if torch.compiler.is_compiling() or type(y) is not Tensor:
        return y
    if sys.platform == "linux" and y.device.type == "cpu" and y.nbytes >= LARGE:
        _advise(y)
    return y


def _advise(x: Tensor) -> None:
    # advice that is refused changes nothing
    start = -(-x.data_ptr() // _PAGE) * _PAGE
    length = (x.data_ptr() + x.nbytes - start) // _PAGE * _PAGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
