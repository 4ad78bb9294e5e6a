"""FAVOR+ with hyperbolic features. Choromanski et al., https://arxiv.org/abs/2009.14794, Lemma 1"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, Features
from linattn.feature_maps.favor import positive_features
from linattn.feature_maps.random_projection import RandomProjection, num_pairs


@final
class HyperbolicFavorFeatureMap(FeatureMap):
    """φ(x) = exp([Ω u, −Ω u] − ‖u‖²/2) / √f with u = x/d^¼: each direction is used both ways.

    They behave as positive features do, with half the rows and a lower variance for the same number of features."""

    def __init__(self, head_dim: int, num_features: int | None = None, *, orthogonal: bool = True, scaling: int = 0):
        super().__init__()
        rows = num_pairs(num_features, head_dim)
        self.projection = RandomProjection(head_dim, rows, orthogonal=orthogonal, scaling=scaling)

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        projected = self.projection(x)
        return positive_features(torch.cat([projected, -projected], dim=-1), x)

    def key(self, x: Float[Tensor, "*b n d"]) -> Features:
        return self.query(x)
