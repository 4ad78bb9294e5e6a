"""Hedgehog's learned features, which can be as spiky as softmax. Zhang et al., https://arxiv.org/abs/2402.04347"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.checks import check_sizes, check_types, given
from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.per_head_linear import PerHeadLinear
from linattn.ops.features import Features, value_dtype
from linattn.ops.numerics import accumulator


@final
class HedgehogFeatureMap(FeatureMap):
    """φ(x) = softmax([x W, −x W]) over its 2d features. Queries and keys have their own W for each of `num_heads` and
    of `num_key_heads` (None: as many), initially the identity of `head_dim` channels. The paper trains W to bring the
    attention weights close to those of a given softmax attention."""

    @check_types
    def __init__(self, head_dim: int, num_heads: int, *, num_key_heads: int | None = None):
        super().__init__()
        check_sizes(head_dim=head_dim, num_heads=num_heads, **given(num_key_heads=num_key_heads))
        self.query_linear = PerHeadLinear(num_heads, head_dim, head_dim, identity=True)
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        self.key_linear = PerHeadLinear(num_key_heads, head_dim, head_dim, identity=True)

    def query(self, x: Float[Tensor, "*b h n d"]) -> Features:
        return _softmax_of_both_signs(self.query_linear(x), x.dtype)

    def key(self, x: Float[Tensor, "*b h n d"]) -> Features:
        return _softmax_of_both_signs(self.key_linear(x), x.dtype)


def _softmax_of_both_signs(x: Float[Tensor, "*b n d"], dtype: torch.dtype) -> Features:
    return Features(torch.cat([x, -x], dim=-1).softmax(-1, dtype=accumulator(x.dtype)).to(value_dtype(dtype)))
