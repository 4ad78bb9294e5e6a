"""Softmax attention with all options of `nn.MultiheadAttention`: additive masks, dropout, and returned weights."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from linattn.nn.torch_masks import TorchMasks, score_bias
from linattn.types import Keys, Outputs, Queries, Values


def torch_softmax(
    q: Queries,
    k: Keys,
    v: Values,
    masks: TorchMasks,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Outputs, Float[Tensor, "b h n m"] | None]:
    """y = drop(softmax(q kᵀ/√d + bias)) v, and the dropped weights. A query that sees no key gets zeros.

    There may be more keys than the masks cover: all queries see those behind them. `causal` adds the causal order to
    the masks; the call's own `is_causal`, as in torch, only describes its mask."""
    n, m = q.shape[-2], k.shape[-2]
    ordered = causal or masks.causal
    if ordered and n == m and masks.key_padding is None and not need_weights:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True), None
    bias = score_bias(masks, q.dtype)
    if causal or (masks.causal and masks.attn is None):
        order = q.new_full((n, n), -torch.inf).triu(1)
        bias = order if bias is None else bias + order
    nothing = None
    if bias is not None:
        bias = F.pad(bias, (0, m - bias.shape[-1]))
        # a softmax over no key has NaN gradients: such a query attends to all keys and its output is discarded
        nothing = (bias == -torch.inf).all(-1, keepdim=True)
        bias = bias.masked_fill(nothing, 0)
    if not need_weights:
        y, weights = F.scaled_dot_product_attention(q, k, v, bias, dropout), None
    else:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        weights = F.dropout((scores if bias is None else scores + bias).softmax(-1), dropout)
        weights = weights if nothing is None else torch.where(nothing, 0, weights)
        y = weights @ v
    return y if nothing is None else torch.where(nothing, 0, y), weights
