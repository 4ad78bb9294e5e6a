"""Softmax attention through torch's fused kernels: the baseline, and the kernel of windows and projections."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.compaction import pack_heads, per_query_head, without
from linattn.ops.state import check_part


class SoftmaxState(NamedTuple):
    """All keys and values so far, and the mask of the present ones (None: all). It grows with every token."""

    k: Float[Tensor, "b hk m d"]
    v: Float[Tensor, "b hk m dv"]
    present: Bool[Tensor, " b #hk m"] | None = None


def softmax_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b hk m d"],
    v: Float[Tensor, "b hk m dv"],
    /,
    *,
    causal: bool = False,
    key_mask: Bool[Tensor, "#b #hk m"] | None = None,
) -> Float[Tensor, "b h n dv"]:
    """y_i = Σ_j softmax_j(q_i·k_j / √d) v_j over all keys (causal: j ≤ i); zeros where no key is present.

    In causal attention a masked token is missing as a query too: its output is zeros."""
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"causal attention needs as many queries as keys, but there are {q.shape[-2]} and {k.shape[-2]}"
        )
    if key_mask is None:
        return fused_softmax(q, k, v, causal=causal)
    if causal:
        # after packing, a present query sees the present keys before it: no mask is needed, whose size would be
        # quadratic
        packed = pack_heads(q, k, v, key_mask)
        return packed.unpack(fused_softmax(packed.q, packed.k, packed.v, causal=True))
    some = key_mask.any(-1, keepdim=True)
    visible, some = (per_query_head(x.unsqueeze(-2), q.shape[1]) for x in (key_mask | ~some, some))
    y = fused_softmax(q, without(k, key_mask), without(v, key_mask), visible=visible)
    return torch.where(some, y, 0)


def extend_softmax(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b hk n d"],
    v: Float[Tensor, "b hk n dv"],
    state: SoftmaxState | None = None,
    /,
    *,
    key_mask: Bool[Tensor, "#b #hk n"] | None = None,
) -> tuple[Float[Tensor, "b h n dv"], SoftmaxState]:
    """Process the next tokens of causal `softmax_attention`."""
    if key_mask is not None:
        key_mask = key_mask.expand(k.shape[0], -1, -1)
        k, v = without(k, key_mask), without(v, key_mask)
    if state is None:
        return softmax_attention(q, k, v, causal=True, key_mask=key_mask), SoftmaxState(k, v, key_mask)
    past, n = state.k.shape[2:3], q.shape[-2]
    check_part("k", state.k, k.dtype, k.shape[1], *past, k.shape[3])
    check_part("v", state.v, v.dtype, v.shape[1], *past, v.shape[3])
    state = SoftmaxState(torch.cat([state.k, k], -2), torch.cat([state.v, v], -2), _present_after(state, key_mask, n))
    if n == 1 and state.present is None:
        return fused_softmax(q, state.k, state.v), state
    m = state.k.shape[-2]
    i, j = torch.arange(m - n, m, device=q.device)[:, None], torch.arange(m, device=q.device)
    visible = j <= i
    if state.present is not None:
        # a masked query sees only itself, because kernels differ on a softmax over no key
        visible = per_query_head(visible & (state.present.unsqueeze(-2) | (i == j)), q.shape[1])
    y = fused_softmax(q, state.k, state.v, visible=visible)
    if key_mask is not None:
        y = torch.where(per_query_head(key_mask, q.shape[1]).unsqueeze(-1), y, 0)
    return y, state


def fused_softmax(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b hk m d"],
    v: Float[Tensor, "b hk m dv"],
    /,
    *,
    visible: Bool[Tensor, "*#b #n m"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "b h n dv"]:
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


def _present_after(state: SoftmaxState, key_mask: Tensor | None, n: int) -> Tensor | None:
    if state.present is None and key_mask is None:
        return None
    b, _, past, _ = state.k.shape
    before = state.present if state.present is not None else state.k.new_ones(b, 1, past, dtype=torch.bool)
    now = key_mask if key_mask is not None else state.k.new_ones(b, 1, n, dtype=torch.bool)
    heads = max(before.shape[1], now.shape[1])
    return torch.cat([before.expand(-1, heads, -1), now.expand(-1, heads, -1)], -1)
