"""Taylor features: exp(s) ≈ 1 + s for unit q and k (Li et al., https://arxiv.org/abs/2007.14902), or 1 + s + s²/2 for
s = q·k/√d (Arora et al., Based, https://arxiv.org/abs/2402.18668)"""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, unit
from linattn.ops.features import Features, value_dtype


@final
class TaylorFeatureMap(FeatureMap):
    """φ(x) = [1, x/‖x‖], so that φ(q)·φ(k) = 1 + cos(q, k), which is never negative. A zero vector stays zero."""

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        return Features(torch.cat([torch.ones_like(x[..., :1]), unit(x)], dim=-1))

    key = query


@final
class SecondOrderTaylorFeatureMap(FeatureMap):
    """φ(x) = [1, u, u²/√2, u_i u_j for i < j] with u = x/d^¼, so that φ(q)·φ(k) = 1 + s + s²/2 ≥ ½ with s = q·k/√d.

    There are 1 + d + d(d+1)/2 features, half as many as the outer product of Based: 153 for d = 16, but 2,145 for
    d = 64, so use few channels per head."""

    scales_products = True

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        d = x.shape[-1]
        u = x.to(value_dtype(x.dtype)) * d**-0.25
        # rolling u by r = 1 … d/2 channels pairs all once, but for an even d the last roll has each of its pairs twice
        rolled = torch.cat([u, u], dim=-1).unfold(-1, d, 1)[..., 1 : d // 2 + 1, :]
        pairs = (u.unsqueeze(-2) * rolled).flatten(-2)[..., : d * (d - 1) // 2]
        return Features(torch.cat([torch.ones_like(u[..., :1]), u, u.square() * math.sqrt(0.5), pairs], dim=-1))

    key = query
