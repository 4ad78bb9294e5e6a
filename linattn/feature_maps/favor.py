"""FAVOR+: positive random features of exp(q·k). Choromanski et al., https://arxiv.org/abs/2009.14794, Lemma 1"""

import math
from typing import final

from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, Features
from linattn.feature_maps.random_projection import RandomProjection, default_num_features
from linattn.ops.backends.base import accumulator


def half_squared_norm(x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n"]:
    """Return ‖x/d^¼‖²/2."""
    return x.to(accumulator(x.dtype)).square().sum(-1) / (2 * math.sqrt(x.shape[-1]))


def positive_features(projected: Float[Tensor, "*b n f"], x: Float[Tensor, "*b n d"]) -> Features:
    """Return exp(projected − ‖x/d^¼‖²/2) / √f."""
    return Features(projected, -half_squared_norm(x) - 0.5 * math.log(projected.shape[-1]), "exp")


@final
class FavorFeatureMap(FeatureMap):
    """φ(x) = exp(Ω u − ‖u‖²/2) / √f with u = x/d^¼, so that φ(q)·φ(k) has the mean exp(q·k/√d) over draws of Ω.

    No constant is added, as log_scale keeps the features in range. The relative variance is exp(‖q + k‖²/√d) / f: at
    unit variance and d = 64 that is e¹⁶/f, beyond any use. `linattn.diagnostics` measures it on your q and k."""

    def __init__(self, head_dim: int, num_features: int | None = None, *, orthogonal: bool = True, scaling: int = 0):
        super().__init__()
        rows = default_num_features(head_dim) if num_features is None else num_features
        self.projection = RandomProjection(head_dim, rows, orthogonal=orthogonal, scaling=scaling)

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        return positive_features(self.projection(x), x)

    def key(self, x: Float[Tensor, "*b n d"]) -> Features:
        return self.query(x)
