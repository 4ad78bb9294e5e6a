"""Sums along the sequence that make m keys or values into r. Wang et al., Linformer, https://arxiv.org/abs/2006.04768

A masked token is a missing token: the real ones count on without it, so that the j-th real token meets the j-th column
of a learned projection, or the j-th place of the windows, wherever padding stands."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.backends.base import accumulator
from linattn.ops.compaction import compact, pack


def project_sequence(
    x: Float[Tensor, "b hk m d"],
    weight: Float[Tensor, "*#hk r max"],
    /,
    *,
    key_mask: Bool[Tensor, "#b #hk m"] | None = None,
) -> Float[Tensor, "b hk r d"]:
    """Σ_j E_rj x_j over the real tokens; the columns of a sequence shorter than E stay out."""
    if key_mask is not None:
        x = pack(x, compact(key_mask))
    return weight[..., : x.shape[-2]] @ x


def pool_sequence(
    x: Float[Tensor, "b hk m d"],
    size: int,
    /,
    *,
    weight: Float[Tensor, "size d"] | None = None,
    key_mask: Bool[Tensor, "#b #hk m"] | None = None,
) -> tuple[Float[Tensor, "b hk r d"], Bool[Tensor, " b #hk r"] | None]:
    """Windows of `size` tokens, one after the other: their means, or sums with a weight for each place and channel.

    Also tells which windows hold a real token (None: all). A window that is not full gives the mean, or the sum,
    of what it holds.
    """
    count = torch.full(x.shape[:1], x.shape[-2], device=x.device).view(-1, 1)
    if key_mask is not None:
        where = compact(key_mask.expand(x.shape[0], -1, -1))
        x, count = pack(x, where), where.total
    r = (x.shape[-2] + size - 1) // size
    windows = F.pad(x, (0, 0, 0, r * size - x.shape[-2])).unflatten(-2, (r, size))
    held = (count.unsqueeze(-1) - size * torch.arange(r, device=x.device)).clamp(0, size)
    dtype = accumulator(x.dtype)
    if weight is None:
        pooled = windows.sum(-2, dtype=dtype) / held.clamp(min=1).unsqueeze(-1)
    else:
        pooled = (windows * weight).sum(-2, dtype=dtype)
    return pooled.to(x.dtype), None if key_mask is None else held > 0
