"""The running scale by which sums over exponential keys are divided, so that they stay in the range of their dtype. The
size of a key is its largest feature."""

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.ops.calls import SHORT
from linattn.ops.numerics import exact_dtype, is_exporting, is_readable
from linattn.ops.tokens.cutting import running_max


def finite(log_scale: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return `log_scale` with zeros in the place of −inf, the scale of no keys."""
    return log_scale.masked_fill(log_scale == -torch.inf, 0)


# a scale of e^−14 to e^10 serves as well as e^0: it leaves room above for sums and gradients, below for small products
_STEP, _LEAST = 24.0, -14.0
# in cumulative sums it stands for −∞, of which differences would be NaN
_FORGETS = -1e6


def running_scale(
    log_size: Float[Tensor, "*b n"],
    log_decay: Float[Tensor, "*#b #n"] | None = None,
    start: Float[Tensor, "*b 1"] | None = None,
    /,
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"] | None, Float[Tensor, "*b 1"]]:
    """Return the scale m, the decay of the sums over keys, and the last m. At token i, exp(m_i) divides the sums, with
    m_i = max(m_{i−1} + log_decay_i, log_size_i), and their decay is m_{i−1} + log_decay_i − m_i.

    m_0 is `start`, the last m of the call before (None: −inf, no key yet). Without a log_decay, sizes are rounded to
    multiples of 24 first, so that m rarely changes: it lies between 10 below and 14 above the largest size. A decay of
    None is zero everywhere. Where m is −inf, the returned scale is zero, and so is the decay of the next token.

    No gradient passes through m: any m would give the same outputs."""
    scale = log_size.detach() if log_decay is not None else ((log_size.detach() - _LEAST) / _STEP).floor() * _STEP
    start = scale.new_tensor(-torch.inf) if start is None else start
    scale = torch.cat([start.expand(*scale.shape[:-1], 1), scale], -1)
    if log_decay is None:
        scale = _running_max(scale)
    else:
        total = log_decay.detach().to(exact_dtype(scale)).clamp(min=_FORGETS).expand_as(log_size).cumsum(-1)
        total = torch.cat([total.new_zeros(*total.shape[:-1], 1), total], -1)
        scale = (_running_max(scale - total) + total).to(scale.dtype)
    last, none, scale = scale[..., -1:], scale == -torch.inf, finite(scale)
    # differences of the rounded maxima, so that the decays of pieces multiply exactly to that of the whole sequence
    decay = scale[..., :-1] - scale[..., 1:]
    if log_decay is not None:
        decay = log_decay + decay
        # rounding may leave it slightly above zero, where a clamp would stop the gradient of log_decay
        decay = decay - decay.detach().clamp(min=0)
    decay = decay.masked_fill(none[..., :-1], 0)
    # a copy, because a view would keep the whole sequence alive in a state of constant size
    return scale[..., 1:], None if log_decay is None and _is_zero(decay) else decay, last.clone()


def _running_max(x: Tensor) -> Tensor:
    if not is_exporting():
        return x.cummax(-1).values
    start = x[..., :1]
    return torch.cat([start, torch.maximum(start, running_max(x[..., 1:]))], -1)


def _is_zero(decay: Tensor) -> bool:
    """Return whether the decay can be left out: it is zero everywhere and needs no gradient. Return False where it
    cannot be read; also for short sequences, which without a decay run on another backend: its rounding differs, so a
    later key would change earlier outputs."""
    known = is_readable(decay) and not decay.requires_grad
    return known and not 1 < decay.shape[-1] <= SHORT and not decay.any()
