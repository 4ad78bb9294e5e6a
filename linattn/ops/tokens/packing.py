"""Packing: sequences of any lengths joined to one without padding, where a decay of −inf begins each."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def packed_log_decay(cu_seqlens: Int[Tensor, " s"], n: int, /) -> Float[Tensor, " n"]:
    """Return the `log_decay` of `causal_linear_attention` for `n` packed tokens: −inf where a sequence begins, else 0.

    `cu_seqlens` is what variable-length kernels take: the starts of the sequences, and n; sequences may be empty.
    Nothing is read on the host. Add any other decay to the result."""
    log_decay = torch.zeros(n + 1, device=cu_seqlens.device)
    # an empty sequence at the end begins after the last token
    return log_decay.index_fill(0, cu_seqlens.long(), -torch.inf)[:n]
