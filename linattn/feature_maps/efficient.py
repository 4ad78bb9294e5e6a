"""Efficient attention: softmax of the queries over channels, of the keys over tokens.
Shen et al., https://arxiv.org/abs/1812.01243, eq. 4"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from linattn.checks import check_types
from linattn.feature_maps.base import FeatureMap
from linattn.ops.features import Features
from linattn.ops.numerics import accumulator


@final
class EfficientFeatureMap(FeatureMap):
    """φ_q(x) = softmax(x) over channels, φ_k(x) = exp(x). Each feature is normalised by its own sum over keys, which
    makes that exponential the softmax over tokens: y = Σ_c softmax(q)_c · Σ_j softmax_j(k_jc) v_j.

    A feature φ_k(x)_c counts as zero where all k_jc are more than about 57 below the largest entry of the keys. Without
    `norm_queries`, φ_q(x) = x."""

    normalize = "keys"

    @check_types
    def __init__(self, *, norm_queries: bool = True):
        super().__init__()
        self.norm_queries = norm_queries

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        if not self.norm_queries:
            return Features(x)
        return Features(x.log_softmax(-1, dtype=accumulator(x.dtype)), function="exp")

    def key(self, x: Float[Tensor, "*b n d"]) -> Features:
        return Features(x, function="exp")
