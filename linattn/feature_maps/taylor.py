"""First-order Taylor features: exp(q·k) ≈ 1 + q·k, for unit q and k. Li et al., https://arxiv.org/abs/2007.14902"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, Features
from linattn.ops.backends.base import accumulator


@final
class TaylorFeatureMap(FeatureMap):
    """φ(x) = [1, x/‖x‖], so that φ(q)·φ(k) = 1 + cos(q, k), which is never negative. A zero vector stays zero."""

    def query(self, x: Float[Tensor, "*b n d"]) -> Features:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulator(x.dtype))
        unit = (x / norm.masked_fill(norm == 0, 1)).to(x.dtype)
        return Features(torch.cat([torch.ones_like(x[..., :1]), unit], dim=-1))

    def key(self, x: Float[Tensor, "*b n d"]) -> Features:
        return self.query(x)
