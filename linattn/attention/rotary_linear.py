"""Rotary positions after the feature map. Su et al., RoFormer, https://arxiv.org/abs/2104.09864, eq. 19"""

from functools import partial
from typing import NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from linattn.attention.base import InnerAttention, group_mask, group_queries
from linattn.attention.rotary import count_positions
from linattn.checks import check_numbers, check_types
from linattn.feature_maps.base import FeatureMap, checked_feature_map
from linattn.ops.features import checked_features
from linattn.ops.linear import causal_linear_attention, linear_attention
from linattn.ops.nested import check_part
from linattn.ops.numerics import accumulator, divide
from linattn.ops.state import LinearState
from linattn.ops.tokens.compaction import present_heads
from linattn.ops.tokens.rotary import rotate_by, rotations
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class RotaryLinearAttentionState(NamedTuple):
    """The sums of rotated keys and values, the sums of plain keys and ones, and the number of tokens seen."""

    numerator: LinearState
    denominator: LinearState
    position: Int[Tensor, "b hk"]


_Term = tuple[Tensor, Tensor, Tensor]


@final
class RotaryLinearAttention(InnerAttention):
    """y_i = Σ_j (R_i φ(q_i))·(R_j φ(k_j)) v_j / Σ_j φ(q_i)·φ(k_j), over all j or, if `causal`, j ≤ i. Only the
    numerator has rotated features: a denominator of them could be zero. Queries and keys belong to the same tokens;
    masked tokens have no position. R_i rotates features c and c + ⌊f/2⌋ by i · base^(−c/⌊f/2⌋), so a larger `base`
    rotates more slowly.

    φ is `feature_map`; a call raises ValueError if φ has a scale per token, as FAVOR+ and exp have."""

    state_kind = RotaryLinearAttentionState
    same_tokens = True

    @check_types
    def __init__(self, feature_map: FeatureMap, *, causal: bool = False, base: float = 10000.0):
        super().__init__()
        self.feature_map = checked_feature_map(feature_map, FeatureMap)
        check_numbers(least=1.0, base=base)
        self.causal, self.base = causal, base

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        if self.causal:
            return super()._attend(q, k, v, key_mask)
        positions, _ = count_positions(k, None, key_mask)
        attend = partial(linear_attention, key_mask=group_mask(key_mask), normalize=None)
        y, total = (attend(*term) for term in self._terms(q, k, v, key_mask, positions))
        return divide(y, total).to(v.dtype).flatten(1, 2)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: RotaryLinearAttentionState | None, key_mask: KeyMask
    ) -> tuple[Outputs, RotaryLinearAttentionState]:
        *past, start = state or (None, None, None)
        if state is not None:
            check_part("position", start, torch.int64, k.shape[1])
        positions, end = count_positions(k, start, key_mask)
        terms = self._terms(q, k, v, key_mask, positions)
        for name, sums, (_, keys, values) in zip(("numerator", "denominator"), past, terms, strict=True):
            if sums is not None:
                check_part(name, sums.S, keys.dtype, k.shape[1], 1, keys.shape[-1], values.shape[-1])
        attend = partial(causal_linear_attention, key_mask=group_mask(key_mask), normalize=None)
        (y, numerator), (total, denominator) = (attend(*term, sums) for term, sums in zip(terms, past, strict=True))
        return divide(y, total).to(v.dtype).flatten(1, 2), RotaryLinearAttentionState(numerator, denominator, end)

    def _terms(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask, positions: Tensor) -> tuple[_Term, _Term]:
        """Return queries (b hk g n f), keys (b hk 1 n f) and values (b hk 1 n dv) twice: rotated features and v for the
        numerator, plain features and ones for the denominator."""
        q, k, v = present_heads(q, k, v, key_mask)
        queries = checked_features("queries", self.feature_map.query(q))
        keys = checked_features("keys", self.feature_map.key(k))
        if queries.log_size() is not None or keys.log_size() is not None:
            raise ValueError(
                f"{type(self.feature_map).__name__} keeps features in range by a scale per token, which rotated and "
                "plain features would not share: rotate queries and keys before such a map"
            )
        # numerator and denominator are rounded once, after the division
        q, k, v = (x.to(accumulator(v.dtype)) for x in (queries.value(), keys.value(), v))
        q, k, v = group_queries(q, k.shape[1]), k.unsqueeze(2), v.unsqueeze(2)
        rotation = rotations(positions.unsqueeze(2), k.shape[-1], k.dtype, base=self.base)
        return (rotate_by(q, *rotation), rotate_by(k, *rotation), v), (q, k, torch.ones_like(v[..., :1]))
