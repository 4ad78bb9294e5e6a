"""The rules that all forms of an operator share: dtypes of sums, denominators, masked tokens, gradients, autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter

from linattn.checks import check_floating


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over `dtype`: float32, or float64 for float64. A half-precision sum stops growing."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact_dtype(x: Tensor) -> torch.dtype:
    """Return float64, for a few numbers that need it; float32 on the device of x if that is Apple's, which has none."""
    return torch.float32 if x.device.type == "mps" else torch.float64


_NONE = {dtype: torch.finfo(dtype).tiny / torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, with zeros where the denominator is zero: a query that resembles no key gets zeros. Adding a constant to
    the denominator instead would bias every output."""
    return numerator / infinite_if_none(denominator)


def infinite_if_none(denominator: Tensor, *, nonnegative: bool = False) -> Tensor:
    """Return the denominator with infinity in place of zeros, so that quotients are zero. Below 1e-31 (in float32) it
    counts as zero: it has lost digits, and gradients would overflow. `nonnegative`, if known, saves time."""
    least = _NONE[denominator.dtype]
    if nonnegative:
        # no denominator is negative: one operation instead of three, which a single token notices
        return torch.threshold(denominator, least, torch.inf)
    return denominator.masked_fill(denominator.abs() < least, torch.inf)


def zero_masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return x with zeros at masked keys, whatever they hold; their gradients are zeros, too."""
    return x if key_mask is None else torch.where(key_mask.unsqueeze(-1), x, 0)


def zero_masked_tokens(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with zeros at masked keys and values, and at masked queries that are not finite: NaN there
    would reach the gradients of earlier keys. Needed before φ, whose derivative may not be finite there."""
    if key_mask is None:
        return q, k, v
    q = torch.where(key_mask.unsqueeze(-1) | q.isfinite(), q, 0)
    return q, zero_masked(k, key_mask), zero_masked(v, key_mask)


def align(x: Tensor, ndim: int) -> Tensor:
    """Return x with dimensions of size 1 in front, so that it has `ndim` dimensions in all."""
    return x[(None,) * (ndim - x.ndim)] if x.ndim < ndim else x


def expand(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x if x.shape == shape else x.expand(shape)


def summable(x: Tensor, name: str) -> Tensor:
    """Return x in the dtype in which its gradient may be summed, where tokens share a number. Raise ValueError, with
    `name`, unless it is a floating-point tensor."""
    check_floating(**{name: x})
    return x.to(accumulator(x.dtype))


def summed(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, the sum of `gradient` over the dimensions in which x is broadcast."""
    return gradient.sum_to_size(x.shape).to(x.dtype)


def decay_gradient(gradient: Tensor, log_decay: Tensor) -> Tensor:
    """Return `gradient`, which may be overwritten, summed to the shape of `log_decay`, zero where log_decay is −inf."""
    gradient = gradient.sum_to_size(log_decay.shape)
    # a search for −inf takes a twentieth of the time of a mask; a NaN compares false
    if not is_readable(log_decay) or not log_decay.numel() or not log_decay.amin() > -torch.inf:
        gradient.masked_fill_(log_decay == -torch.inf, 0)
    return gradient.to(log_decay.dtype)


def is_readable(x: Tensor) -> bool:
    """Return whether the numbers of x can be read, without waiting for a device: fake tensors, graphs and transforms
    have none."""
    wrapped = torch.compiler.is_compiling() or type(x) not in (Tensor, Parameter)
    return not (wrapped or x.device.type != "cpu" or is_functorch_wrapped_tensor(x))


def is_exporting() -> bool:
    """Return whether torch.export is tracing. In torch 2.11 `torch.compiler.is_exporting()` is True in torch.compile
    too, unlike this function."""
    return torch.compiler._is_exporting_flag


def check_exported_length(n: int, what: str) -> None:
    """Raise NotImplementedError, about `what`, if n is symbolic in an exported graph, which cannot loop n times."""
    if is_exporting() and isinstance(n, torch.SymInt):
        raise NotImplementedError(f"{what} can be exported for one length only: leave it out of dynamic_shapes")


_AS_IT_IS = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a region without autocast on the device of x: autocast would multiply float32 sums in half precision."""
    compiling = torch.compiler.is_compiling()
    if not (compiling or torch._C._is_any_autocast_enabled()):
        return _AS_IT_IS
    device = x.device.type
    # torch 2.11 cannot trace the last question: what is compiled is for a device that has it
    if device == "meta" or not (compiling or torch.amp.is_autocast_available(device)):
        return _AS_IT_IS
    # an exported graph may be called where autocast is on
    enabled = torch.is_autocast_enabled(device) or (compiling and is_exporting())
    return torch.autocast(device, enabled=False) if enabled else _AS_IT_IS


def exactly(forward: Callable[[Any, bool], tuple[Tensor, ...]]) -> Callable[[Any, bool], tuple[Tensor, ...]]:
    """Return `forward` without autocast, for a backend without a gradient; for others `operator` turns it off."""

    def run(call: Any, save: bool) -> tuple[Tensor, ...]:
        with without_autocast(call[0]):
            return forward(call, save)

    return run
