"""Memory for loops over blocks. Fresh memory costs time: it is not in the cache, and a CPU faults in each page of it
when it is first written, four times as slow as the writing itself. Here both are avoided where the system lets us."""

import ctypes
import sys

from torch import Tensor

from linattn.ops.elementwise import Elementwise

# tensors from here on are asked to be in pages of 2 MiB
LARGE = 8 * 2**20
_PAGE, _MADV_HUGEPAGE = 4096, 14


class Workspace:
    """Scratch tensors by name, in the dtype and on the device of x, that stay in the cache because they are used again.
    Taking a name invalidates what it held. Without a shape it is empty, for an operation's `out`, which resizes it."""

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
