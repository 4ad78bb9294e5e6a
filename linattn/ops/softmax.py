"""Softmax attention through torch's fused kernels: the baseline, and the kernel of windows and projections."""

from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.backends.reference import present
from linattn.ops.compaction import join_masks, pack_heads, per_query_head
from linattn.ops.state import check_tokens
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class SoftmaxState(NamedTuple):
    """All keys and values so far, and the mask of the present ones (None: all). It grows with every token."""

    k: Keys
    v: Values
    present: KeyMask = None


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
    y = fused_softmax(q, present(k, key_mask), present(v, key_mask), visible=visible)
    return torch.where(some, y, 0)


def extend_softmax(
    q: Queries, k: Keys, v: Values, state: SoftmaxState | None = None, /, *, key_mask: KeyMask = None
) -> tuple[Outputs, SoftmaxState]:
    """Process the next tokens of causal `softmax_attention`."""
    if key_mask is not None:
        key_mask = key_mask.expand(k.shape[0], -1, -1)
        k, v = present(k, key_mask), present(v, key_mask)
    if state is None:
        return softmax_attention(q, k, v, causal=True, key_mask=key_mask), SoftmaxState(k, v, key_mask)
    check_tokens(state.k, state.v, k, v, state.k.shape[2])
    mask = join_masks(state.k, state.present, k, key_mask)
    state = SoftmaxState(torch.cat([state.k, k], -2), torch.cat([state.v, v], -2), mask)
    n, m = q.shape[-2], state.k.shape[-2]
    if n == 1 and state.present is None:
        return fused_softmax(q, state.k, state.v), state
    i, j = torch.arange(m - n, m, device=q.device)[:, None], torch.arange(m, device=q.device)
    visible = j <= i
    if state.present is not None:
        visible = among_present(visible, state.present, i == j, q.shape[1])
    y = fused_softmax(q, state.k, state.v, visible=visible)
    if key_mask is not None:
        y = torch.where(per_query_head(key_mask, q.shape[1]).unsqueeze(-1), y, 0)
    return y, state


def fused_softmax(
    q: Queries, k: Keys, v: Values, /, *, visible: Bool[Tensor, "*#b #n m"] | None = None, causal: bool = False
) -> Outputs:
    """Run torch's kernel. Memory is linear in n and m (except `visible` itself), and sums are float32 or better."""
    d, dv = q.shape[-1], v.shape[-1]
    # the kernels with linear memory want one width; zeros change neither q·k nor the first dv outputs
    q, k, v = (F.pad(x, (0, max(d, dv) - x.shape[-1])) if d != dv else x for x in (q, k, v))
    if not torch.compiler.is_compiling() and 0 in (q.numel(), k.numel(), v.numel()):
        # torch 2.11 divides by the size of what is empty
        return F.pad(q[..., :0], (0, dv))
    grouped = False
    # numbers of heads may be symbolic; only a branch makes a bool of their comparison, as the kernel needs
    if q.shape[1] != k.shape[1]:
        grouped = True
    y = F.scaled_dot_product_attention(q, k, v, visible, is_causal=causal, scale=d**-0.5, enable_gqa=grouped)
    return y[..., :dv]


def among_present(visible: Tensor, present: Tensor, itself: Tensor, num_heads: int) -> Bool[Tensor, "*b n m"]:
    """Hide missing keys, but let each see itself: some kernels' softmax over no key has NaN gradients."""
    return per_query_head(visible & (present.unsqueeze(-2) | itself), num_heads)
