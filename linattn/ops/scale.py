"""Features too large for their dtype, as value · exp(log_scale): sums are kept relative to the largest scale so far,
and what a larger one takes off them is a decay. No later key has a part in it, so nothing leaks from the future."""

import torch
from jaxtyping import Float
from torch import Tensor


def running_scale(
    log_scale: Float[Tensor, "*b n"],
    log_decay: Float[Tensor, "*#b #n"] | None = None,
    start: Float[Tensor, "*b 1"] | None = None,
    /,
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"], Float[Tensor, "*b 1"]]:
    """m_i = max(m_{i-1} + log_decay_i, log_scale_i); the decay of sums relative to it, log_decay_i + m_{i-1} − m_i ≤ 0;
    and the last m, the next call's start (None: −inf, no key yet).

    Where there is no key yet (log_scale −inf), m and the decay are zero. No gradient passes through m: any would give
    the same outputs."""
    if start is None:
        start = log_scale.new_full((*log_scale.shape[:-1], 1), -torch.inf)
    m = torch.cat([start, log_scale.detach()], -1)
    step = m.new_zeros(1) if log_decay is None else log_decay
    if log_decay is None:
        m = m.cummax(-1).values
    else:
        exact = torch.float32 if m.device.type == "mps" else torch.float64
        faded = log_decay.detach().to(exact).expand_as(log_scale).cumsum(-1)
        faded = torch.cat([faded.new_zeros(*faded.shape[:-1], 1), faded], -1)
        m = ((m - faded).cummax(-1).values + faded).to(m.dtype)
    none = m == -torch.inf
    shown = m.masked_fill(none, 0)
    # the differences of rounded maxima, so that pieces of a sequence multiply to exactly what the whole does
    decay = step + shown[..., :-1] - shown[..., 1:]
    # rounding may leave it a little above zero, where a clamp would stop the gradient of log_decay
    decay = (decay - decay.detach().clamp(min=0)).masked_fill(none[..., :-1], 0)
    # a copy, as a view would keep the whole sequence alive in a state of constant size
    return shown[..., 1:], decay, m[..., -1:].clone()
