"""Memory for loops over blocks. Fresh memory costs time: it is not in the cache, and a CPU faults in each page of it
when it is first written, four times as slow as the writing itself. Here both are avoided where the system lets us."""

import ctypes
import math
import sys

import torch
from torch import Tensor

from linattn.ops.elementwise import Elementwise

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
        view = self._views.get((name, *shape))
        if view is None:
            buffer, size = self._buffers.get(name), math.prod(shape)
            if buffer is None or buffer.numel() < size:
                buffer = self._buffers[name] = self._x.new_empty(size)
            view = self._views[name, *shape] = buffer[:size].view(shape)
        return view

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of batches of matrices."""
        return self(name, *a.shape[:2], b.shape[2]).baddbmm_(a, b, beta=0)

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x ∘ y, until the next one."""
        return torch.mul(x, y, out=self("scratch", *x.shape))

    def features(self, name: str, x: Tensor, phi: Elementwise) -> Tensor:
        """Return φ of a copy of x."""
        x = self(name, *x.shape).copy_(x)
        return x if phi.derivative is None else phi.overwrite(x, self("scratch", *x.shape))

    def through_map(self, gradient: Tensor, features: Tensor, phi: Elementwise) -> Tensor:
        """Turn the gradient of φ(x) into that of x by the chain rule, in place."""
        if phi.derivative is None:
            return gradient
        return gradient.mul_(phi.derivative(features, self("scratch", *features.shape)))


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
