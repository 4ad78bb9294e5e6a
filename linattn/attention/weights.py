"""The matrix of weights that a method stands for though it never builds it: to look at, and to test with."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.base import InnerAttention


def attention_weights(
    inner: InnerAttention,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b hk m d"],
    *,
    key_mask: Bool[Tensor, "#b #hk m"] | None = None,
) -> Float[Tensor, "b h n m"]:
    """The matrix A with inner(q, k, v) = A v for every v, exactly: the outputs for one-hot values.

    Normalised linear attention's rows sum to one, as softmax's; Linformer's need not, and its weights, as those of
    random trigonometric features, may be negative. Time and memory are quadratic, whatever the method's are."""
    m = k.shape[-2]
    one_hot = torch.eye(m, dtype=k.dtype, device=k.device).expand(*k.shape[:2], m, m)
    return inner(q, k, one_hot, key_mask=key_mask)
