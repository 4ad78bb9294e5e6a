"""Softmax attention through torch's fused kernels: the baseline, and the kernel of windows and projections."""

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.numerics import zero_masked
from linattn.ops.tokens.compaction import pack_heads, per_query_head
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


def softmax_attention(q: Queries, k: Keys, v: Values, /, *, causal: bool = False, key_mask: KeyMask = None) -> Outputs:
    """y_i = Σ_j softmax_j(q_i·k_j / √d) v_j over all keys (causal: j ≤ i); zeros where no key is present.

    In causal attention a masked token is missing as a query too: its output is zeros."""
    if causal or key_mask is None:
        # after packing, a present query sees the present keys before it: no mask is needed, whose size would be
        # quadratic
        packed = pack_heads(q, k, v, key_mask)
        return packed.unpack(fused_softmax(packed.q, packed.k, packed.v, causal=causal))
    some = key_mask.any(-1, keepdim=True)
    visible, some = (per_query_head(x.unsqueeze(-2), q.shape[1]) for x in (key_mask | ~some, some))
    y = fused_softmax(q, zero_masked(k, key_mask), zero_masked(v, key_mask), visible=visible)
    return torch.where(some, y, 0)


def fused_softmax(
    q: Queries, k: Keys, v: Values, /, *, visible: Bool[Tensor, "*#b #n m"] | None = None, causal: bool = False
) -> Outputs:
    """Run torch's kernel on the `visible` keys (None: all). Memory is linear in n and m, sums are float32 or better."""
    d, dv = q.shape[-1], v.shape[-1]
    # the kernels with linear memory want one width; zeros change neither q·k nor the first dv outputs
    q, k, v = (F.pad(x, (0, max(d, dv) - x.shape[-1])) if d != dv else x for x in (q, k, v))
    if not torch.compiler.is_compiling() and 0 in (q.numel(), k.numel(), v.numel()):
        # torch 2.11 divides by the size of what is empty; these sums are zeros, with which k and v have gradients
        return F.pad(q[..., :0], (0, dv)) + k[..., :0].sum() + v[..., :0].sum()
    grouped = False
    # numbers of heads may be symbolic; only a branch makes a bool of their comparison, as the kernel needs
    if q.shape[1] != k.shape[1]:
        grouped = True
    y = F.scaled_dot_product_attention(q, k, v, visible, is_causal=causal, scale=d**-0.5, enable_gqa=grouped)
    return y[..., :dv]


def among_present(visible: Tensor, present: Tensor, itself: Tensor, num_heads: int) -> Bool[Tensor, "*b n m"]:
    """Hide keys not in `present` from all but their own query (`itself`): without keys, some gradients are NaN."""
    return per_query_head(visible & (present.unsqueeze(-2) | itself), num_heads)
