"""FAVOR+ with a floor under its features, as in the published code: 1e-4 there, which exceeds most features.
Choromanski et al., https://arxiv.org/abs/2009.14794, and the code that came with the paper"""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from linattn.attention.base import InnerAttention, group_queries
from linattn.feature_maps.base import checked_feature_map
from linattn.feature_maps.favor import FavorFeatureMap, half_squared_norm
from linattn.ops.features import FeatureState
from linattn.ops.linear import causal_linear_attention, read, summarize
from linattn.ops.nested import check_part, checked_kind
from linattn.ops.numerics import accumulator, divide, zero_masked
from linattn.ops.scale import finite, running_scale
from linattn.ops.tokens.compaction import present_heads
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class FlooredFavorState(NamedTuple):
    """The sums of φ(k) [v, 1]ᵀ, of [v, 1], and the largest of Ωu, over the keys so far."""

    features: FeatureState
    floor: Float[Tensor, "b hk c"]
    largest: Float[Tensor, "b hk 1"]


class _Keys(NamedTuple):
    """Ωu − ‖u‖²/2 and the largest of Ωu per key, both −inf at a missing key, and [v, 1], zero at a missing key."""

    exponent: Float[Tensor, "b hk m f"]
    largest: Float[Tensor, "b hk m"]
    values: Float[Tensor, "b hk m c"]


@final
class FlooredFavorAttention(InnerAttention):
    """y_i = Σ_j s_ij v_j / Σ_j s_ij with s_ij = (φ(q_i) + ε e^{a_i})·(φ(k_j) + ε e^{b_i}), φ(x) = exp(Ωu − ‖u‖²/2),
    u = x/d^¼, the Ω of `feature_map`, ε = `epsilon` > 0, a_i the largest number in Ωu of the query, and b_i the largest
    of all keys that the query sees.

    If `causal`, a query sees the keys up to its own, so each output depends on its prefix alone; the published code
    takes the largest of later keys too. The gradient is that of the formula, so it flows through a and b as well."""

    state_kind = FlooredFavorState

    def __init__(self, feature_map: FavorFeatureMap, *, epsilon: float, causal: bool = False):
        super().__init__()
        if not epsilon > 0:
            raise ValueError(f"epsilon must be positive (without a floor it is LinearAttention), but is {epsilon}")
        self.feature_map = checked_feature_map(feature_map, FavorFeatureMap)
        self.epsilon, self.causal = epsilon, causal

    def _summarize(self, k: Keys, v: Values, key_mask: KeyMask) -> FlooredFavorState:
        keys = self._keys(zero_masked(k, key_mask), zero_masked(v, key_mask), key_mask)
        largest = torch.cat([_no_key(k), keys.largest], -1).amax(-1, keepdim=True)
        features = (keys.exponent - finite(largest).detach().unsqueeze(-1)).exp()
        sums = summarize(features.unsqueeze(2), keys.values.unsqueeze(2))
        return FlooredFavorState(FeatureState(sums, largest.detach()), keys.values.sum(-2), largest)

    def read(self, q: Queries, summary: FlooredFavorState) -> Outputs:
        summary = checked_kind(summary, FlooredFavorState)
        features = self._queries(q, summary.floor.shape[1])
        y = read(features, summary.features.sums, normalize=None)
        largest = finite(summary.largest)
        return self._with_floor(y, features, summary.floor.unsqueeze(-2), largest - largest.detach()).to(q.dtype)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: FlooredFavorState | None, key_mask: KeyMask
    ) -> tuple[Outputs, FlooredFavorState]:
        q, k, v = present_heads(q, k, v, key_mask)
        keys, features = self._keys(k, v, key_mask), self._queries(q, k.shape[1])
        if state is None:
            start, past, scale, floor = _no_key(k), None, None, keys.values.new_zeros(*k.shape[:2], v.shape[-1] + 1)
        else:
            (past, scale), floor, start = state
            hk, dtype = k.shape[1], accumulator(k.dtype)
            check_part("features", past.S, dtype, hk, 1, features.shape[-1], v.shape[-1] + 1)
            check_part("floor", floor, dtype, hk, v.shape[-1] + 1)
            check_part("largest", start, dtype, hk, 1)
        top, log_decay, end = running_scale(keys.largest, None, scale)
        largest = torch.cat([start, keys.largest], -1).cummax(-1).values
        y, sums = causal_linear_attention(
            features,
            (keys.exponent - top.unsqueeze(-1)).exp().unsqueeze(2),
            keys.values.unsqueeze(2),
            past,
            log_decay=None if log_decay is None else log_decay.unsqueeze(2),
            normalize=None,
        )
        floors = torch.cat([floor.unsqueeze(-2), keys.values], -2).cumsum(-2)
        y = self._with_floor(y, features, floors[..., 1:, :], finite(largest[..., 1:]) - top)
        # copies, as views would keep the whole sequence alive in a state of constant size
        state = FlooredFavorState(FeatureState(sums, end), floors[..., -1, :].clone(), largest[..., -1:].clone())
        return y.to(v.dtype), state

    def _queries(self, q: Tensor, num_key_heads: int) -> Float[Tensor, "b hk g n f"]:
        exponent, largest = self._exponents(q)
        # gradients flow through the largest, as the floor is relative to it
        features = (exponent - largest.unsqueeze(-1)).exp() + self.epsilon
        return group_queries(features, num_key_heads)

    def _keys(self, k: Tensor, v: Tensor, key_mask: KeyMask) -> _Keys:
        v = v.to(accumulator(v.dtype))
        exponent, largest = self._exponents(k)
        values = zero_masked(torch.cat([v, torch.ones_like(v[..., :1])], -1), key_mask)
        if key_mask is not None:
            exponent = exponent.masked_fill(~key_mask.unsqueeze(-1), -torch.inf)
            largest = largest.masked_fill(~key_mask, -torch.inf)
        return _Keys(exponent, largest, values)

    def _exponents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.feature_map.projection(x)
        return projected - half_squared_norm(x).unsqueeze(-1), projected.amax(-1)

    def _with_floor(self, y: Tensor, features: Tensor, floor: Tensor, log_floor: Tensor) -> Tensor:
        """Return the outputs from y = φ Σ φ(k) [v, 1]ᵀ, where φ = `features` have the queries' floor, but φ(k) lack the
        keys' floor: it adds ε exp(log_floor) Σ_f φ_f `floor` to y. `floor` is Σ [v, 1]."""
        weight = self.epsilon * features.sum(-1) * log_floor.exp().unsqueeze(2)
        y = y + weight.unsqueeze(-1) * floor.unsqueeze(2)
        return divide(y[..., :-1], y[..., -1:]).flatten(1, 2)


def _no_key(k: Tensor) -> Float[Tensor, "b hk 1"]:
    return torch.full((*k.shape[:2], 1), -torch.inf, dtype=accumulator(k.dtype), device=k.device)
