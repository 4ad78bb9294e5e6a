"""Packing: sequences of any lengths joined to one without padding, where a decay of −inf begins each."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from linattn.checks import check_sizes, check_tensors, check_types
from linattn.ops.numerics import is_readable


@check_types
def packed_log_decay(cu_seqlens: Int[Tensor, " s"], n: int, /) -> Float[Tensor, " n"]:
    """Return the `log_decay` of `causal_linear_attention` for `n` packed tokens: −inf where a sequence begins, else 0.

    `cu_seqlens` is what variable-length kernels take: the starts of the sequences, and n; sequences may be empty. Add
    any other decay to the result. Raises ValueError unless `cu_seqlens` ascend from 0 or more to at most n, which is
    not checked on a GPU or in a compiled graph."""
    check_tensors(cu_seqlens=cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        came = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens must be integers (s,), but are {came}")
    if is_readable(cu_seqlens):
        check_sizes(n=n, least=0)
        starts = cu_seqlens.tolist()
        if starts != sorted(starts) or (starts and not 0 <= starts[0] <= starts[-1] <= n):
            raise ValueError(f"cu_seqlens must ascend within [0, {n}], as there are {n} tokens, but are {starts!s:.80}")
    log_decay = torch.zeros(n + 1, device=cu_seqlens.device)
    # an empty sequence at the end begins after the last token
    return log_decay.index_fill(0, cu_seqlens.long(), -torch.inf)[:n]
