"""Linformer and kernels in one attention, in the two orders there are: projected features, or features of what is
projected. Wang et al., https://arxiv.org/abs/2006.04768; Katharopoulos et al., https://arxiv.org/abs/2006.16236"""

from typing import final

import torch

from linattn import FeatureMap, InnerAttention, LinearAttention, SequenceProjection
from linattn.ops.numerics import divide
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class Combination(InnerAttention):
    """A feature map and Linformer's projections of keys and values, E and F; F = E unless it is given."""

    causal = False

    def __init__(
        self,
        feature_map: FeatureMap,
        key_projection: SequenceProjection,
        value_projection: SequenceProjection | None = None,
    ):
        super().__init__()
        self.feature_map, self.key_projection = feature_map, key_projection
        self.value_projection = key_projection if value_projection is None else value_projection


@final
class ProjectedFeatures(Combination):
    """y_i = φ(q_i) (E φ(K))ᵀ (F V) / φ(q_i)·Σ_j φ(k_j), the talk's own proposal; F = E unless it is given.

    With one matrix for both it is linear attention with EᵀE between keys and values, so its weights may be negative,
    and their rows sum to one only on average over Gaussian E."""

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        phi_q, phi_k = self.feature_map.query(q).value(), self.feature_map.key(k).value()
        present = phi_k if key_mask is None else torch.where(key_mask.unsqueeze(-1), phi_k, 0)
        projected, _ = self.key_projection(phi_k, key_mask=key_mask)
        values, _ = self.value_projection(v, key_mask=key_mask)
        return divide(phi_q @ (projected.mT @ values), phi_q @ present.sum(-2).unsqueeze(-1))


@final
class FeaturesOfProjected(Combination):
    """y_i = φ(q_i) φ(E K)ᵀ (F V) / φ(q_i)·Σ_r φ(E K)_r: linear attention to Linformer's r keys; F = E unless given.

    Its weights over the r projected tokens are those of a kernel: never negative, and their rows sum to one."""

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        projected, present = self.key_projection(k, key_mask=key_mask)
        values, _ = self.value_projection(v, key_mask=key_mask)
        return LinearAttention(self.feature_map)(q, projected, values, key_mask=present)
