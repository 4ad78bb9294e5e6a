"""Hedgehog's learned features, which can be as spiky as softmax. Zhang et al., https://arxiv.org/abs/2402.04347"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, value_dtype
from linattn.feature_maps.per_head_linear import PerHeadLinear
from linattn.ops.backends.base import accumulator


@final
class HedgehogFeatureMap(FeatureMap):
    """φ(x) = softmax([x W, −x W]) over its 2d features, with the W of each head, at first the identity, for queries and
    keys apart. The paper trains W so that the attention weights come close to a given softmax attention's."""

    def __init__(self, head_dim: int, num_heads: int, *, num_key_heads: int | None = None):
        super().__init__()
        self.query_linear = PerHeadLinear(num_heads, head_dim, head_dim, identity=True)
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        self.key_linear = PerHeadLinear(num_key_heads, head_dim, head_dim, identity=True)

    def query(self, x: Float[Tensor, "*b h n d"]) -> Float[Tensor, "*b h n f"]:
        return self.scaled_query(x)[0].to(x.dtype)

    def key(self, x: Float[Tensor, "*b h n d"]) -> Float[Tensor, "*b h n f"]:
        return self.scaled_key(x)[0].to(x.dtype)

    def scaled_query(self, x: Float[Tensor, "*b h n d"]) -> tuple[Float[Tensor, "*b h n f"], None]:
        return _softmax_both_ways(self.query_linear(x)).to(value_dtype(x.dtype)), None

    def scaled_key(self, x: Float[Tensor, "*b h n d"]) -> tuple[Float[Tensor, "*b h n f"], None]:
        return _softmax_both_ways(self.key_linear(x)).to(value_dtype(x.dtype)), None


def _softmax_both_ways(x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n f"]:
    return torch.cat([x, -x], dim=-1).softmax(-1, dtype=accumulator(x.dtype))
