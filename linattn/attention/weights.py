"""The attention matrix of a method that never builds it, for pictures and tests."""

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.attention.base import InnerAttention, checked_inner
from linattn.attention.checks import check_keys
from linattn.attention.gates import AnyGates
from linattn.attention.linformer import StridedConvolution
from linattn.types import KeyMask, Keys, Queries


def attention_weights(
    inner: InnerAttention, q: Queries, k: Keys, *, key_mask: KeyMask = None, gates: AnyGates = None
) -> Float[Tensor, "b h n m"]:
    """Return the matrix A of `inner` for `q` and `k`, with inner(q, k, v) = A v for every v. Its columns are the
    outputs for one-hot values. Keys that are False in `key_mask` have zeros. `gates` are those that a call of `inner`
    takes. Raises ValueError for a `StridedConvolution`, which has a matrix per channel.

    Rows sum to one for softmax and for normalised linear attention, but not always for Linformer. Linformer and random
    trigonometric features may have negative weights. Time and memory are quadratic for any method."""
    inner = checked_inner(inner)
    if any(isinstance(part, StridedConvolution) for part in inner.modules()):
        raise ValueError("a StridedConvolution weights each channel of v differently, so there is no single matrix")
    check_keys(k, k, key_mask)
    m = k.shape[-2]
    one_hot = torch.eye(m, dtype=k.dtype, device=k.device).expand(*k.shape[:2], m, m)
    return inner(q, k, one_hot, key_mask=key_mask, gates=gates)
