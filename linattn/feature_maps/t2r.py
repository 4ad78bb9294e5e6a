"""Transformer-to-RNN's learned features. Kasai et al., https://arxiv.org/abs/2103.13076, eq. 5"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.per_head_linear import PerHeadLinear


@final
class T2RFeatureMap(FeatureMap):
    """φ(x) = ReLU(x W + b), with W and b of each head, for queries and keys apart; as many features as channels, unless
    said otherwise (the paper takes 32). A query whose features are all zero resembles no key: its output is zero."""

    def __init__(
        self, head_dim: int, num_heads: int, *, num_key_heads: int | None = None, num_features: int | None = None
    ):
        super().__init__()
        f = head_dim if num_features is None else num_features
        self.query_linear = PerHeadLinear(num_heads, head_dim, f)
        self.key_linear = PerHeadLinear(num_heads if num_key_heads is None else num_key_heads, head_dim, f)

    def query(self, x: Float[Tensor, "*b h n d"]) -> Float[Tensor, "*b h n f"]:
        return self.query_linear(x).relu().to(x.dtype)

    def key(self, x: Float[Tensor, "*b h n d"]) -> Float[Tensor, "*b h n f"]:
        return self.key_linear(x).relu().to(x.dtype)
