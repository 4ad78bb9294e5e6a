"""Softmax attention through torch's fused kernels, with what they leave open: widths, and keys that nobody has."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional as F


def softmax_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b hk m d"],
    v: Float[Tensor, "b hk m dv"],
    /,
    *,
    visible: Bool[Tensor, "*#b n m"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "b h n dv"]:
    """y_i = Σ_j softmax_j(q_i·k_j / √d) v_j over the visible keys (the first i if causal); zeros if there is none.

    Memory is linear in n and m (but for `visible` itself), and sums are float32 or better, in every dtype.
    """
    d, dv = q.shape[-1], v.shape[-1]
    # the kernels that are linear in memory want one width; zeros change neither q·k nor the first dv outputs
    q, k, v = (F.pad(x, (0, max(d, dv) - x.shape[-1])) if d != dv else x for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, visible, is_causal=causal, scale=d**-0.5, enable_gqa=grouped)
    return y[..., :dv]


def per_query_head(x: Shaped[Tensor, "b hk *rest"], num_heads: int) -> Shaped[Tensor, "b h *rest"]:
    """What is given for each key head, for each of the query heads that share it. One for all heads stays one."""
    return x if x.shape[1] == 1 else x.repeat_interleave(num_heads // x.shape[1], 1)


def without(x: Float[Tensor, "b hk m d"], key_mask: Bool[Tensor, "#b #hk m"]) -> Float[Tensor, "b hk m d"]:
    """Zeros for the masked tokens: a kernel multiplies them by zero, which is not enough if they hold NaN."""
    return torch.where(key_mask.unsqueeze(-1), x, 0)
