"""Feature maps, one method per file. `FEATURE_MAPS` makes each from (head_dim, num_heads, num_key_heads)."""

from collections.abc import Callable

import torch

from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.efficient import EfficientFeatureMap
from linattn.feature_maps.elementwise import ElementwiseFeatureMap, ScaledFeatureMap
from linattn.feature_maps.favor import FavorFeatureMap, HyperbolicFavorFeatureMap, TrigonometricFavorFeatureMap
from linattn.feature_maps.generalized import GeneralizedFeatureMap
from linattn.feature_maps.hedgehog import HedgehogFeatureMap
from linattn.feature_maps.random_projection import RandomProjection, default_num_features, redraw_features_
from linattn.feature_maps.t2r import T2RFeatureMap
from linattn.feature_maps.taylor import SecondOrderTaylorFeatureMap, TaylorFeatureMap

FEATURE_MAPS: dict[str, Callable[[int, int, int], FeatureMap]] = {
    "identity": lambda d, h, hk: ElementwiseFeatureMap("identity"),
    "elu": lambda d, h, hk: ElementwiseFeatureMap("elu_plus_one"),
    "relu": lambda d, h, hk: ElementwiseFeatureMap("relu"),
    "squared_relu": lambda d, h, hk: ElementwiseFeatureMap("squared_relu"),
    "softplus": lambda d, h, hk: ElementwiseFeatureMap("softplus"),
    "sigmoid": lambda d, h, hk: ElementwiseFeatureMap("sigmoid"),
    "exp": lambda d, h, hk: ElementwiseFeatureMap("exp"),
    "taylor": lambda d, h, hk: TaylorFeatureMap(),
    "taylor2": lambda d, h, hk: SecondOrderTaylorFeatureMap(),
    "efficient": lambda d, h, hk: EfficientFeatureMap(),
    "favor": lambda d, h, hk: FavorFeatureMap(d),
    "favor_hyperbolic": lambda d, h, hk: HyperbolicFavorFeatureMap(d),
    "favor_trigonometric": lambda d, h, hk: TrigonometricFavorFeatureMap(d),
    # the epsilon is the Performer's
    "favor_relu": lambda d, h, hk: GeneralizedFeatureMap(
        torch.relu, epsilon=1e-3, projection=RandomProjection(d, default_num_features(d))
    ),
    "t2r": lambda d, h, hk: T2RFeatureMap(d, h, num_key_heads=hk),
    "hedgehog": lambda d, h, hk: HedgehogFeatureMap(d, h, num_key_heads=hk),
}

__all__ = [
    "FEATURE_MAPS",
    "EfficientFeatureMap",
    "ElementwiseFeatureMap",
    "FavorFeatureMap",
    "FeatureMap",
    "GeneralizedFeatureMap",
    "HedgehogFeatureMap",
    "HyperbolicFavorFeatureMap",
    "RandomProjection",
    "ScaledFeatureMap",
    "SecondOrderTaylorFeatureMap",
    "T2RFeatureMap",
    "TaylorFeatureMap",
    "TrigonometricFavorFeatureMap",
    "redraw_features_",
]
