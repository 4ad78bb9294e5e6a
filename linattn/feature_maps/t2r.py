"""Transformer-to-RNN's learned features. Kasai et al., https://arxiv.org/abs/2103.13076, eq. 5"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from linattn.checks import check_sizes, check_types, given
from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.per_head_linear import PerHeadLinear
from linattn.ops.features import Features


@final
class T2RFeatureMap(FeatureMap):
    """φ(x) = ReLU(x W + b). Queries and keys have their own W and b for each of `num_heads` and of `num_key_heads`
    (None: as many), from `head_dim` channels to `num_features` (None: as many; the paper takes 32). A query whose
    features are all zero resembles no key, so its output is zero."""

    @check_types
    def __init__(
        self, head_dim: int, num_heads: int, *, num_key_heads: int | None = None, num_features: int | None = None
    ):
        super().__init__()
        check_sizes(head_dim=head_dim, num_heads=num_heads)
        check_sizes(**given(num_key_heads=num_key_heads, num_features=num_features))
        f = head_dim if num_features is None else num_features
        self.query_linear = PerHeadLinear(num_heads, head_dim, f)
        self.key_linear = PerHeadLinear(num_heads if num_key_heads is None else num_key_heads, head_dim, f)

    def query(self, x: Float[Tensor, "*b h n d"]) -> Features:
        return Features(self.query_linear(x).relu().to(x.dtype))

    def key(self, x: Float[Tensor, "*b h n d"]) -> Features:
        return Features(self.key_linear(x).relu().to(x.dtype))
