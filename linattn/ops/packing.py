"""Sequences of any lengths one after the other, as one sequence without padding: a decay of −inf begins each anew."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def packed_log_decay(cu_seqlens: Int[Tensor, " s"], n: int, /) -> Float[Tensor, " n"]:
    """The `log_decay` of `causal_linear_attention` for n packed tokens: −inf where a sequence begins, else zero.

    `cu_seqlens` is what variable-length kernels take: where the sequences begin, and n; empty ones may be among them.
    Nothing is read on the host. A decay of one's own is added to it."""
    log_decay = torch.zeros(n + 1, device=cu_seqlens.device)
    # an empty sequence at the end begins behind the last token
    return log_decay.index_fill(0, cu_seqlens.long(), -torch.inf)[:n]
