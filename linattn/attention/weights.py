"""The matrix of weights that a method stands for though it never builds it: to look at, and to test with."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.base import InnerAttention, checked_inner
from linattn.attention.linformer import LinformerAttention, StridedConvolution
from linattn.attention.softmax import SoftmaxAttention


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
    inner = checked_inner(inner)
    if any(isinstance(part, StridedConvolution) for part in inner.modules()):
        raise ValueError("a StridedConvolution weighs each channel of the values in its own way: it has no one matrix")
    m = k.shape[-2]
    one_hot = torch.eye(m, dtype=k.dtype, device=k.device).expand(*k.shape[:2], m, m)
    return inner(q, k, one_hot, key_mask=key_mask)


def projected_weights(
    inner: LinformerAttention,
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b hk m d"],
    *,
    key_mask: Bool[Tensor, "#b #hk m"] | None = None,
) -> Float[Tensor, "b h n r"]:
    """Linformer's own softmax, over the projected keys: its rows sum to one, and it is linear in the length."""
    projected, present = inner.key_projection(k, key_mask=key_mask)
    return attention_weights(SoftmaxAttention(), q, projected, key_mask=present)
