"""Features too large for their dtype, as value · exp(log_scale): sums are kept relative to the largest scale so far,
and a larger scale makes them decay. Later keys have no part in it, so nothing leaks from the future."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from linattn.ops.calls import SHORT
from linattn.ops.numerics import is_exporting
from linattn.ops.tokens.cutting import running_max

# a scale of e^−14 to e^10 serves as well as e^0: it leaves room above for sums and gradients, below for small products
_STEP, _LEAST = 24.0, -14.0
# in sums it stands for −∞, after which the differences of the numbers before would be none
_FORGETS = -1e6


def running_scale(
    log_scale: Float[Tensor, "*b n"],
    log_decay: Float[Tensor, "*#b #n"] | None = None,
    start: Float[Tensor, "*b 1"] | None = None,
    /,
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"] | None, Float[Tensor, "*b 1"]]:
    """Return the scale that the sums are relative to at each token, their decay, and the next call's start (None: no
    key yet).

    With m_i = max(m_{i-1} + log_decay_i, log_scale_i), sums are relative to m, and the last m is the next start.
    Without a log_decay, sums are relative to a multiple of 24 instead, at most 14 above m, so that a decay is rare: it
    comes where m passes such a multiple. A decay of None is known to be zero everywhere. Short sequences always
    return a decay: whether there is one decides the backend, and that must not depend on later tokens.

    Before the first key (log_scale −inf), scale and decay are zero. No gradient passes through m: any would give the
    same outputs."""
    if start is None:
        start = log_scale.new_full((*log_scale.shape[:-1], 1), -torch.inf)
    m = torch.cat([start, log_scale.detach()], -1)
    if log_decay is None:
        m = _running_max(m)
        relative_to = ((m - _LEAST) / _STEP).floor() * _STEP
    else:
        exact = torch.float32 if m.device.type == "mps" else torch.float64
        faded = log_decay.detach().to(exact).clamp(min=_FORGETS).expand_as(log_scale).cumsum(-1)
        faded = torch.cat([faded.new_zeros(*faded.shape[:-1], 1), faded], -1)
        relative_to = m = (_running_max(m - faded) + faded).to(m.dtype)
    none = m == -torch.inf
    shown = relative_to.masked_fill(none, 0)
    # differences of the rounded maxima, so that the decays of pieces multiply exactly to that of the whole sequence
    decay = shown[..., :-1] - shown[..., 1:]
    if log_decay is not None:
        decay = log_decay + decay
        # rounding may leave it slightly above zero, where a clamp would stop the gradient of log_decay
        decay = decay - decay.detach().clamp(min=0)
    decay = decay.masked_fill(none[..., :-1], 0)
    # a copy, because a view would keep the whole sequence alive in a state of constant size
    # the length is asked for last, because it would be a condition of a graph
    needless = log_decay is None and _all_zero(decay) and not 1 < decay.shape[-1] <= SHORT
    return shown[..., 1:], None if needless else decay, m[..., -1:].clone()


def _running_max(x: Tensor) -> Tensor:
    if not is_exporting():
        return x.cummax(-1).values
    start = x[..., :1]
    return torch.cat([start, torch.maximum(start, running_max(x[..., 1:]))], -1)


def _all_zero(decay: Tensor) -> bool:
    """Tell whether the decay is known to be zero. False in compilation, under vmap, or where reading it would wait."""
    if torch.compiler.is_compiling() or type(decay) is not Tensor or is_functorch_wrapped_tensor(decay):
        return False
    return decay.device.type == "cpu" and not decay.any()
