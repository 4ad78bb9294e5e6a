"""Rotary positions after the feature map. Su et al., RoFormer, https://arxiv.org/abs/2104.09864, eq. 19"""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.attention.base import InnerAttention, group_queries
from linattn.attention.checks import checked_heads
from linattn.attention.rotary import count_places
from linattn.feature_maps.base import FeatureMap, checked_feature_map
from linattn.ops.backends.base import accumulator, divide
from linattn.ops.compaction import finite_queries, without
from linattn.ops.linear import causal_linear_attention, linear_attention
from linattn.ops.rotary import rotate
from linattn.ops.state import LinearState, check_part


class RotaryLinearAttentionState(NamedTuple):
    """The sums of rotated keys and values, those of plain keys and ones, and the number of tokens seen."""

    numerator: LinearState
    denominator: LinearState
    position: Int[Tensor, "b hk 1"]


@final
class RotaryLinearAttention(InnerAttention):
    """y_i = Σ_j (R_i φ(q_i))·(R_j φ(k_j)) v_j / Σ_j φ(q_i)·φ(k_j): only the numerator has rotated features, as a
    negative similarity is harmless there. Queries and keys belong to the same tokens; masked tokens have no position.

    Feature maps with a scale per token, such as FAVOR+ and exp, are refused."""

    def __init__(self, feature_map: FeatureMap, *, causal: bool = False, base: float = 10000.0):
        super().__init__()
        self.feature_map = checked_feature_map(feature_map, FeatureMap)
        self.causal, self.base = causal, base

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk n d"],
        v: Float[Tensor, "b hk n dv"],
        *,
        key_mask: Bool[Tensor, "#b #hk n"] | None = None,
    ) -> Float[Tensor, "b h n dv"]:
        if self.causal:
            return self.extend(q, k, v, key_mask=key_mask)[0]
        q, k, v, _ = checked_heads(q, k, v, key_mask)
        dtype, places = v.dtype, count_places(k, key_mask, 0)
        q, k, v, key_mask = self._features(q, k, v, key_mask)
        numerator = linear_attention(*self._rotated(q, k, places), v, key_mask=key_mask, normalize=None)
        denominator = linear_attention(q, k, torch.ones_like(v[..., :1]), key_mask=key_mask, normalize=None)
        return divide(numerator, denominator).to(dtype).flatten(1, 2)

    def extend(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk n d"],
        v: Float[Tensor, "b hk n dv"],
        state: RotaryLinearAttentionState | None = None,
        *,
        key_mask: Bool[Tensor, "#b #hk n"] | None = None,
    ) -> tuple[Float[Tensor, "b h n dv"], RotaryLinearAttentionState]:
        if not self.causal:
            return super().extend(q, k, v, state, key_mask=key_mask)
        q, k, v, state = checked_heads(q, k, v, key_mask, state, kind=RotaryLinearAttentionState, causal=True)
        if state is None:
            seen = torch.zeros(*k.shape[:2], 1, dtype=torch.int64, device=k.device)
        else:
            seen = state.position
            check_part("position", seen, torch.int64, k.shape[1], 1)
        dtype, places = v.dtype, count_places(k, key_mask, seen)
        q, k, v, key_mask = self._features(q, k, v, key_mask)
        past = (None, None) if state is None else state[:2]
        if state is not None:
            lead = (k.shape[1], 1, k.shape[-1])
            check_part("numerator", state.numerator.S, k.dtype, *lead, v.shape[-1])
            check_part("denominator", state.denominator.S, k.dtype, *lead, 1)
        y, numerator = causal_linear_attention(
            *self._rotated(q, k, places), v, past[0], key_mask=key_mask, normalize=None
        )
        total, denominator = causal_linear_attention(
            q, k, torch.ones_like(v[..., :1]), past[1], key_mask=key_mask, normalize=None
        )
        seen = torch.cat([seen, places + 1], -1)[..., -1:].clone()
        return divide(y, total).to(dtype).flatten(1, 2), RotaryLinearAttentionState(numerator, denominator, seen)

    def _features(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return features of queries, (b hk g n f), and those of keys, values and mask with a dimension for groups."""
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(
                f"queries and keys must be those of the same tokens, but there are {q.shape[-2]} and {k.shape[-2]}"
            )
        if key_mask is not None:
            q, k, v = finite_queries(q, key_mask), without(k, key_mask), without(v, key_mask)
        # numerator and denominator are rounded once, after the division
        dtype, hk = accumulator(v.dtype), k.shape[1]
        queries, keys = self.feature_map.query(q), self.feature_map.key(k)
        if queries.log_size() is not None or keys.log_size() is not None:
            raise ValueError(
                f"{type(self.feature_map).__name__} keeps features in range by a scale per token, which rotated and "
                "plain features would not share: rotate queries and keys before such a map"
            )
        q, k, v = queries.value().to(dtype), keys.value().to(dtype), v.to(dtype)
        return group_queries(q, hk), k.unsqueeze(2), v.unsqueeze(2), None if key_mask is None else key_mask.unsqueeze(2)

    def _rotated(self, q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, places.unsqueeze(2), base=self.base), rotate(k, places.unsqueeze(2), base=self.base)

    def extra_repr(self) -> str:
        return f"causal={self.causal}, base={self.base}"
