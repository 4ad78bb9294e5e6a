"""Trigonometric random features of softmax's kernel, for comparison: FAVOR+ exists because these fail.
Choromanski et al., https://arxiv.org/abs/2009.14794, eq. 6, after Rahimi and Recht"""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, Features, value_dtype
from linattn.feature_maps.favor import half_squared_norm
from linattn.feature_maps.random_projection import RandomProjection, num_pairs


@final
class TrigonometricFavorFeatureMap(FeatureMap):
    """φ(x) = exp(‖u‖²/2) [cos Ω u, sin Ω u] / √(f/2) with u = x/d^¼, so that φ(q)·φ(k) has the mean exp(q·k/√d).

    They are more precise than positive features where q and k are short. Similarities may be negative, and the
    denominator may be negative or nearly zero: where q and k are long, outputs are noise of any size."""

    def __init__(self, head_dim: int, num_features: int | None = None, *, orthogonal: bool = True, scaling: int = 0):
        super().__init__()
        rows = num_pairs(num_features, head_dim)
        self.projection = RandomProjection(head_dim, rows, orthogonal=orthogonal, scaling=scaling)

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        projected = self.projection(x)
        value = torch.cat([projected.cos(), projected.sin()], dim=-1).to(value_dtype(x.dtype))
        return Features(value, half_squared_norm(x) - 0.5 * math.log(projected.shape[-1]))

    def key(self, x: Float[Tensor, "*b n d"]) -> Features:
        return self.query(x)
