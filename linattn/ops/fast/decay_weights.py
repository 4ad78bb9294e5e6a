"""The weights of decays per head inside a chunk, and the gradient of their logarithms. With the decay α_t of token t,
D_ij is the product of α_t over j < t ≤ i, r_i that over t ≤ i, and w_j that over t > j, within the chunk."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def decay_weights(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return D (B 1 C C), r and w (B 1 C 1) from logarithms (B C 1). These are summed in float64, so that differences
    of long sums stay exact. A decay of −inf begins a new sequence: D is 0 between tokens of two sequences."""
    log_decay, dtype = log_decay.mT, log_decay.dtype
    exact = torch.float32 if log_decay.device.type == "mps" else torch.float64
    begins = log_decay == -torch.inf
    total = log_decay.to(exact).masked_fill(begins, 0).cumsum(-1).mul_(math.log2(math.e)).unsqueeze(-1)
    D = (total - total.mT).to(dtype).exp2_().tril_()
    r, w = (x.to(dtype).exp2() for x in (total, total[..., -1:, :] - total))
    if log_decay.device.type != "cpu" or begins.any():
        sequence = begins.cumsum(-1).unsqueeze(-1)
        D.mul_(sequence == sequence.mT)
        r.mul_(sequence == 0)
        w.mul_(sequence[..., -1:, :] == sequence)
    return D, r, w


def sum_crossing(pairs: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return the gradient of log α_t for all tokens, a sum over all that α_t multiplies: the terms dP_ij P_ij of
    `pairs` (B C C) with j < t ≤ i; `rows` (B C 1) for i ≥ t, the dot products of r_i rows_i and its gradient; and
    `keys` (B C 1) for j < t, those of w_j keys_j and its gradient. Pairs are summed directly: a difference of sums over
    more pairs would leave rounding errors where decays are strong."""
    before = rows + pairs @ pairs.new_ones(pairs.shape[1:]).triu(1)
    return before.tril().sum(1).unsqueeze(-1) + F.pad(keys[:, :-1].cumsum(1), (0, 0, 1, 0))
