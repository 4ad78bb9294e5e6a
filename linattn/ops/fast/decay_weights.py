"""The weights of decays per head inside each of B chunks of C tokens, and the gradient of the decays' logarithms. With
the decay α_t of token t, D_ij is the product of α_t over j < t ≤ i in the chunk, r_i over t ≤ i, and w_j over t > j."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.numerics import exact_dtype, is_readable


def decay_weights(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return D (B 1 C C), r and w (B 1 C 1). `log_decay` (B C 1) is summed in float64, so that differences of long sums
    stay exact. A decay of −inf begins a new sequence: D is 0 between tokens of two sequences."""
    log_decay, dtype = log_decay.mT, log_decay.dtype
    begins = log_decay == -torch.inf
    total = log_decay.to(exact_dtype(log_decay)).masked_fill(begins, 0).cumsum(-1).mul_(math.log2(math.e)).unsqueeze(-1)
    D = (total - total.mT).to(dtype).exp2_().tril_()
    r, w = (x.to(dtype).exp2() for x in (total, total[..., -1:, :] - total))
    if not is_readable(begins) or begins.any():
        sequence = begins.cumsum(-1).unsqueeze(-1)
        D.mul_(sequence == sequence.mT)
        r.mul_(sequence == 0)
        w.mul_(sequence[..., -1:, :] == sequence)
    return D, r, w


def sum_crossing(pair_terms: Tensor, row_terms: Tensor, key_terms: Tensor) -> Tensor:
    """Return the gradient of log α_t (B C 1), the sum of x · dx over the x α_t multiplies. `pair_terms` (B C C) are
    x · dx of the products of rows i and keys j, for j < t ≤ i; `row_terms` (B C 1) of rows times r, for i ≥ t;
    `key_terms` (B C 1) of keys times w, for j < t. Pairs are summed directly: differences of sums over more pairs would
    leave rounding errors where decays are strong."""
    before = row_terms + pair_terms @ pair_terms.new_ones(pair_terms.shape[1:]).triu(1)
    return before.tril().sum(1).unsqueeze(-1) + F.pad(key_terms[:, :-1].cumsum(1), (0, 0, 1, 0))
