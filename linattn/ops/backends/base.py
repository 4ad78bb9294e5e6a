"""The calls that backends take, and what all backends agree on: dtypes, denominators, autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CausalCall(NamedTuple):
    """Checked arguments of `causal_linear_attention`. All tensors have the same number of leading dimensions, each of
    the full size or 1, and q has the full ones, except where heads share queries; `key_mask` and `log_decay` are
    (*b, n), decays per channel (*b, n, f); S (*b, f, dv) and z (*b, f) are the sums before the first token, zeros if
    `fresh`. What is masked does not decay."""

    q: Tensor
    k: Tensor
    v: Tensor
    S: Tensor
    z: Tensor
    log_decay: Tensor | None
    key_mask: Tensor | None
    normalize: str | None
    feature_map: str
    fresh: bool

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions of the outputs."""
        of_queries, of_states = self.q.shape[:-2], self.S.shape[:-2]
        # asking torch takes as long as preparing a launch
        return of_queries if of_queries == of_states else torch.broadcast_shapes(of_queries, of_states)


class SumCall(NamedTuple):
    """Checked arguments of `summarize`; leading dimensions broadcast. It returns S and z."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    feature_map: str

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions of the sums."""
        mask = () if self.key_mask is None else self.key_mask.shape[:-1]
        return torch.broadcast_shapes(self.k.shape[:-2], self.v.shape[:-2], mask)


class ReadCall(NamedTuple):
    """Checked arguments of `read`; leading dimensions broadcast. It returns y in `dtype`."""

    q: Tensor
    S: Tensor
    z: Tensor
    normalize: str | None
    feature_map: str
    dtype: torch.dtype

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions of the outputs."""
        return torch.broadcast_shapes(self.q.shape[:-2], self.S.shape[:-2], self.z.shape[:-1])


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Sums are kept in float32, or in float64 for float64 inputs: a half-precision sum stops growing early."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_NONE = {dtype: torch.finfo(dtype).tiny / torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Zero where the denominator is nothing: a query that resembles no key gets zeros, and adding a constant instead
    would bias every output."""
    return numerator / infinite_if_none(denominator)


def infinite_if_none(denominator: Tensor, *, nonnegative: bool = False) -> Tensor:
    """Dividing by it gives zeros where the denominator is zero, or so near the end of its dtype's range that rounding
    has eaten its terms (in float32 below 1e-31), and gradients would overflow."""
    least = _NONE[denominator.dtype]
    if nonnegative:
        # the same in one operation instead of three, which a single token notices
        return torch.threshold(denominator, least, torch.inf)
    return denominator.masked_fill(denominator.abs() < least, torch.inf)


def align(x: Tensor, ndim: int) -> Tensor:
    """Put dimensions of size 1 in front, up to `ndim` of them in all."""
    return x[(None,) * (ndim - x.ndim)] if x.ndim < ndim else x


def summed(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x from that of x where it is broadcast."""
    return gradient.sum_to_size(x.shape).to(x.dtype)


def decay_gradient(gradient: Tensor, log_decay: Tensor) -> Tensor:
    """Likewise of decays, in place: one of −inf has none, as it begins a new sequence."""
    gradient = gradient.sum_to_size(log_decay.shape)
    # on a CPU, to look for one takes a twentieth of the time of a mask; a NaN is not above anything
    if log_decay.device.type != "cpu" or not log_decay.numel() or not log_decay.amin() > -torch.inf:
        gradient.masked_fill_(log_decay == -torch.inf, 0)
    return gradient.to(log_decay.dtype)


def is_exporting() -> bool:
    """Return whether torch.export is tracing. In torch 2.11 `torch.compiler.is_exporting()` is True in torch.compile
    too, but not its flag."""
    return torch.compiler._is_exporting_flag


_AS_IT_IS = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast would turn products of float32 sums into half-precision ones."""
    compiling = torch.compiler.is_compiling()
    if not (compiling or torch._C._is_any_autocast_enabled()):
        return _AS_IT_IS
    device = x.device.type
    # torch 2.11 cannot trace the last question: what is compiled is for a device that has it
    if device == "meta" or not (compiling or torch.amp.is_autocast_available(device)):
        return _AS_IT_IS
    # an exported graph may be called where autocast is on
    wanted = torch.is_autocast_enabled(device) or (compiling and is_exporting())
    return torch.autocast(device, enabled=False) if wanted else _AS_IT_IS


def exactly(forward: Callable[[Any, bool], tuple[Tensor, ...]]) -> Callable[[Any, bool], tuple[Tensor, ...]]:
    """Run a forward that has matrix products, and no gradient of its own, without autocast."""

    def run(call: Any, save: bool) -> tuple[Tensor, ...]:
        with without_autocast(call[0]):
            return forward(call, save)

    return run
