"""Projections along the sequence, which turn m keys or values into r. Wang et al., Linformer,
https://arxiv.org/abs/2006.04768

A masked token is a missing one: present tokens are counted without it, so that the j-th present token meets the j-th
column of a learned projection, or the j-th place of the windows, wherever padding stands."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.backends.base import accumulator
from linattn.ops.compaction import compact, pack
from linattn.types import KeyMask, Keys


def project_sequence(
    x: Keys, weight: Float[Tensor, "*#hk r max"], /, *, key_mask: KeyMask = None
) -> Float[Tensor, "b hk r d"]:
    """y_r = Σ_j E_rj x_j over the present tokens; a sequence shorter than E leaves its last columns unused."""
    if key_mask is not None:
        x = pack(x, compact(key_mask))
    return weight[..., : x.shape[-2]] @ x


def pool_sequence(
    x: Keys, size: int, /, *, weight: Float[Tensor, "size d"] | None = None, key_mask: KeyMask = None
) -> tuple[Float[Tensor, "b hk r d"], Bool[Tensor, " b #hk r"] | None]:
    """Reduce windows of `size` tokens, one after the other, to their means, or to sums with a weight per place and
    channel.

    Also return which windows hold a present token (None: all). An incomplete window gives the mean, or sum, of its
    tokens."""
    count = torch.full(x.shape[:1], x.shape[-2], device=x.device).view(-1, 1)
    if key_mask is not None:
        where = compact(key_mask.expand(x.shape[0], -1, -1))
        x, count = pack(x, where), where.total
    r = (x.shape[-2] + size - 1) // size
    windows = F.pad(x, (0, 0, 0, r * size - x.shape[-2])).unflatten(-2, (r, size))
    held = (count.unsqueeze(-1) - size * torch.arange(r, device=x.device)).clamp(0, size)
    pooled = (windows if weight is None else windows * weight).sum(-2, dtype=accumulator(x.dtype))
    if weight is None:
        pooled = pooled / held.clamp(min=1).unsqueeze(-1)
    return pooled.to(x.dtype), None if key_mask is None else held > 0
