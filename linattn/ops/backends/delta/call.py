"""The call that backends of the delta rule take."""

from typing import NamedTuple

from torch import Tensor


class DeltaCall(NamedTuple):
    """Checked arguments of `causal_delta_attention`. All tensors have the same number of leading dimensions, each of
    the full size or 1; q has the full ones and S (*b, d, dv) those of the states. `beta` is (*b, n, 1), `log_decay`
    (*b, n, 1) or (*b, n, d). `scale` multiplies the outputs. There is no mask: a masked token is one of zeros, which
    neither writes nor decays."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    S: Tensor
    log_decay: Tensor | None
    scale: float
