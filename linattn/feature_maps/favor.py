"""FAVOR+: random features of exp(q·k), positive ones, and trigonometric ones for comparison.
Choromanski et al., https://arxiv.org/abs/2009.14794, Lemma 1 and eq. 6

Each head has d = `head_dim` channels and f = `num_features` features, d ln d by default. Maps with two features per row
of Ω raise ValueError for an odd number. `orthogonal` and `scaling` choose Ω as in `RandomProjection`."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.checks import check_sizes, check_types, given
from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.random_projection import RandomProjection, default_num_features
from linattn.ops.features import Features, value_dtype
from linattn.ops.numerics import accumulator


class _RandomFeatureMap(FeatureMap):
    """Features of Ω u with u = x/d^¼, `features_per_row` for each row of Ω; the same for queries and keys."""

    features_per_row = 1
    scales_products = True

    @check_types
    def __init__(self, head_dim: int, num_features: int | None = None, *, orthogonal: bool = True, scaling: int = 0):
        super().__init__()
        check_sizes(head_dim=head_dim, **given(num_features=num_features))
        if num_features is not None and num_features % self.features_per_row:
            raise ValueError(f"these features come in pairs, so num_features must be even, but is {num_features}")
        rows = -(-(default_num_features(head_dim) if num_features is None else num_features) // self.features_per_row)
        self.projection = RandomProjection(head_dim, rows, orthogonal=orthogonal, scaling=scaling)

    def key(self, x: Float[Tensor, "*b n d"]) -> Features:
        return self.query(x)


@final
class FavorFeatureMap(_RandomFeatureMap):
    """φ(x) = exp(Ω u − ‖u‖²/2) / √f with u = x/d^¼, so that φ(q)·φ(k) has the mean exp(q·k/√d) over draws of Ω.

    No constant is added, as features have a `log_scale` that keeps them in range. The relative variance is exp(‖q +
    k‖²/√d) / f: at unit variance and d = 64 that is e¹⁶/f, beyond any use. `linattn.diagnostics` measures the error."""

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        return _positive(self.projection(x), x)


@final
class HyperbolicFavorFeatureMap(_RandomFeatureMap):
    """φ(x) = exp([Ω u, −Ω u] − ‖u‖²/2) / √f with u = x/d^¼: each direction is used both ways.

    These features behave as positive ones, with half the rows and a lower variance for the same number of features."""

    features_per_row = 2

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        projected = self.projection(x)
        return _positive(torch.cat([projected, -projected], dim=-1), x)


@final
class TrigonometricFavorFeatureMap(_RandomFeatureMap):
    """φ(x) = exp(‖u‖²/2) [cos Ω u, sin Ω u] / √(f/2) with u = x/d^¼, so that φ(q)·φ(k) has the mean exp(q·k/√d).
    FAVOR+ exists because these fail (eq. 6, after Rahimi and Recht).

    They are more precise than positive features where q and k are short. Similarities may be negative, and the
    denominator may be negative or nearly zero: where q and k are long, outputs are noise of any size."""

    features_per_row = 2

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        projected = self.projection(x)
        value = torch.cat([projected.cos(), projected.sin()], dim=-1).to(value_dtype(x.dtype))
        return Features(value, half_squared_norm(x) - 0.5 * math.log(projected.shape[-1]))


def half_squared_norm(x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n"]:
    """Return ‖x/d^¼‖²/2."""
    return x.to(accumulator(x.dtype)).square().sum(-1) / (2 * math.sqrt(x.shape[-1]))


def _positive(projected: Float[Tensor, "*b n f"], x: Float[Tensor, "*b n d"]) -> Features:
    """Return exp(projected − ‖x/d^¼‖²/2) / √f, where `projected` are products of rows of Ω with x/d^¼."""
    return Features(projected, -half_squared_norm(x) - 0.5 * math.log(projected.shape[-1]), "exp")
