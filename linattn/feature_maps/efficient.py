"""Efficient attention: softmax of the queries over channels, of the keys over tokens.
Shen et al., https://arxiv.org/abs/1812.01243, eq. 4"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, value_dtype
from linattn.feature_maps.exponential import scaled_exp
from linattn.ops.backends.base import accumulator


@final
class EfficientFeatureMap(FeatureMap):
    """φ_q(x) = softmax(x) over channels, φ_k(x) = exp(x); each feature is normalised by its own sum over keys, which
    makes that exponential the softmax over tokens: y = Σ_c softmax(q)_c · Σ_j softmax_j(k_jc) v_j.

    Key channels from about 70 below the largest of the keys count as zero. Without `norm_queries`, φ_q(x) = x."""

    normalize = "keys"

    def __init__(self, *, norm_queries: bool = True):
        super().__init__()
        self.norm_queries = self.logarithmic = norm_queries

    def query(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        return self.scaled_query(x)[0].to(x.dtype)

    def key(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        return torch.exp(x)

    def scaled_query(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n d"], None]:
        if not self.norm_queries:
            return x, None
        return x.softmax(-1, dtype=accumulator(x.dtype)).to(value_dtype(x.dtype)), None

    def scaled_key(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b n"]]:
        return scaled_exp(x)

    def log_query(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n d"], None]:
        return x.log_softmax(-1, dtype=accumulator(x.dtype)), None

    def log_key(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n d"], None]:
        return x, None
