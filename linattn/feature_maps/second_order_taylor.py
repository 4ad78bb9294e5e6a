"""Second-order Taylor features: exp(s) ≈ 1 + s + s²/2, for s = q·k/√d. Arora et al., Based, https://arxiv.org/abs/2402.18668"""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, value_dtype


@final
class SecondOrderTaylorFeatureMap(FeatureMap):
    """φ(x) = [1, u, u²/√2, u_i u_j for i < j] with u = x/d^¼, so that φ(q)·φ(k) = 1 + s + s²/2 ≥ ½ with s = q·k/√d.

    These are 1 + d + d(d+1)/2 features, half as many as the outer product of Based: 153 for d = 16, but 2,145 for
    d = 64, so give it few channels."""

    def query(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n f"]:
        d = x.shape[-1]
        u = x * d**-0.25
        # row r is u turned by r channels: r = 1 … d/2 pairs all once, but for an even d the last row twice
        turned = torch.cat([u, u], dim=-1).unfold(-1, d, 1)[..., 1 : d // 2 + 1, :]
        pairs = (u.unsqueeze(-2) * turned).flatten(-2)[..., : d * (d - 1) // 2]
        return torch.cat([torch.ones_like(x[..., :1]), u, u.square() * math.sqrt(0.5), pairs], dim=-1)

    def key(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n f"]:
        return self.query(x)

    def scaled_query(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], None]:
        return self.query(x.to(value_dtype(x.dtype))), None

    def scaled_key(self, x: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b n f"], None]:
        return self.scaled_query(x)
