"""Rotary positions after the feature map. Su et al., RoFormer, https://arxiv.org/abs/2104.09864, eq. 19"""

from functools import partial
from typing import NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from linattn.attention.base import InnerAttention, causal_view, group_mask, group_queries
from linattn.attention.rotary import check_same_tokens, count_positions
from linattn.feature_maps.base import FeatureMap, checked_feature_map
from linattn.ops.backends.base import accumulator, divide
from linattn.ops.compaction import present_heads
from linattn.ops.linear import causal_linear_attention, linear_attention
from linattn.ops.rotary import turn, turns
from linattn.ops.state import LinearState, check_part
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class RotaryLinearAttentionState(NamedTuple):
    """The sums of rotated keys and values, those of plain keys and ones, and the number of tokens seen."""

    numerator: LinearState
    denominator: LinearState
    position: Int[Tensor, "b hk"]


@final
class RotaryLinearAttention(InnerAttention):
    """y_i = Σ_j (R_i φ(q_i))·(R_j φ(k_j)) v_j / Σ_j φ(q_i)·φ(k_j), over all j or, if `causal`, j ≤ i: only the
    numerator has rotated features, as a negative similarity is harmless there. Queries and keys belong to the same
    tokens; masked tokens have no position. R_i turns features c and c + ⌊f/2⌋ by i · base^(−c/⌊f/2⌋), so a larger
    `base` turns more slowly.

    φ is `feature_map`; a call raises ValueError if it has a scale per token, as FAVOR+ and exp do."""

    state_kind = RotaryLinearAttentionState
    as_causal = causal_view

    def __init__(self, feature_map: FeatureMap, *, causal: bool = False, base: float = 10000.0):
        super().__init__()
        self.feature_map = checked_feature_map(feature_map, FeatureMap)
        self.causal, self.base = causal, base

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        if self.causal:
            return super()._attend(q, k, v, key_mask)
        check_same_tokens(q, k)
        positions, _ = count_positions(k, None, key_mask)
        dtype = v.dtype
        q, k, v = self._features(q, k, v, key_mask)
        attend = partial(linear_attention, key_mask=group_mask(key_mask), normalize=None)
        numerator = attend(*self._rotated(q, k, positions), v)
        denominator = attend(q, k, torch.ones_like(v[..., :1]))
        return divide(numerator, denominator).to(dtype).flatten(1, 2)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: RotaryLinearAttentionState | None, key_mask: KeyMask
    ) -> tuple[Outputs, RotaryLinearAttentionState]:
        past, past_keys, start = state or (None, None, None)
        if state is not None:
            check_part("position", start, torch.int64, k.shape[1])
        positions, end = count_positions(k, start, key_mask)
        dtype = v.dtype
        q, k, v = self._features(q, k, v, key_mask)
        if state is not None:
            lead = (k.shape[1], 1, k.shape[-1])
            check_part("numerator", state.numerator.S, k.dtype, *lead, v.shape[-1])
            check_part("denominator", state.denominator.S, k.dtype, *lead, 1)
        attend = partial(causal_linear_attention, key_mask=group_mask(key_mask), normalize=None)
        y, numerator = attend(*self._rotated(q, k, positions), v, past)
        total, denominator = attend(q, k, torch.ones_like(v[..., :1]), past_keys)
        return divide(y, total).to(dtype).flatten(1, 2), RotaryLinearAttentionState(numerator, denominator, end)

    def _features(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> tuple[Tensor, Tensor, Tensor]:
        """Return features of queries, (b hk g n f), those of keys, (b hk 1 n f), and values, (b hk 1 n dv)."""
        q, k, v = present_heads(q, k, v, key_mask)
        # numerator and denominator are rounded once, after the division
        dtype, hk = accumulator(v.dtype), k.shape[1]
        queries, keys = self.feature_map.query(q), self.feature_map.key(k)
        if queries.log_size() is not None or keys.log_size() is not None:
            raise ValueError(
                f"{type(self.feature_map).__name__} keeps features in range by a scale per token, which rotated and "
                "plain features would not share: rotate queries and keys before such a map"
            )
        q, k, v = queries.value().to(dtype), keys.value().to(dtype), v.to(dtype)
        return group_queries(q, hk), k.unsqueeze(2), v.unsqueeze(2)

    def _rotated(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = turns(positions.unsqueeze(2), k.shape[-1], k.dtype, base=self.base)
        return turn(q, *angles), turn(k, *angles)
