"""Linear attention on split heads: any feature map around the one operator.
Katharopoulos et al., Transformers are RNNs, https://arxiv.org/abs/2006.16236"""

from typing import final

from torch import Tensor

from linattn.attention.base import InnerAttention, group_mask, group_queries
from linattn.attention.checks import check_queries
from linattn.attention.decay import Decay
from linattn.attention.gates import GateNeeds, Gates, checked_needs
from linattn.checks import check_instances, check_types, given
from linattn.feature_maps.base import FeatureMap, checked_feature_map
from linattn.names import unknown_name
from linattn.ops.features import (
    Features,
    FeatureState,
    causal_feature_attention,
    checked_features,
    read_features,
    summarize_features,
)
from linattn.ops.linear import NORMALIZATIONS
from linattn.ops.nested import check_part, checked_kind
from linattn.ops.numerics import accumulator, zero_masked
from linattn.ops.state import LinearState
from linattn.ops.tokens.compaction import present_heads
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


@final
class LinearAttention(InnerAttention):
    """y_i = φ(q_i) Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j) with the φ of `feature_map`, over all j or, if `causal`, j ≤ i.

    `normalize` is as in `causal_linear_attention`; "default" is the choice of the feature map. `decay` makes the past
    fade at a fixed rate per head. `needs` names gates per token: a decay per key head or per channel of a key, and a
    write, which multiplies v and requires `normalize=None`. A decay per channel is for feature maps with a feature per
    channel and no scale per token, as FAVOR+ and exp have. Without `causal`, `decay` and `needs` raise ValueError."""

    state_kind = FeatureState

    @check_types
    def __init__(
        self,
        feature_map: FeatureMap,
        *,
        causal: bool = False,
        normalize: str | None = "default",
        decay: Decay | None = None,
        needs: GateNeeds | None = None,
    ):
        super().__init__()
        feature_map = checked_feature_map(feature_map, FeatureMap)
        check_instances(Decay, **given(decay=decay))
        if not causal and (decay is not None or needs is not None):
            raise ValueError("a decay and gates belong to causal attention, but causal is False")
        normalize = feature_map.normalize if normalize == "default" else normalize
        if normalize not in NORMALIZATIONS:
            raise unknown_name("normalize", normalize, (*NORMALIZATIONS, "default"))
        if needs is not None and checked_needs(needs).write is not None and normalize is not None:
            raise ValueError(f"a write belongs to un-normalised attention, but normalize is {normalize!r}")
        if needs is not None and needs.write == "rate":
            raise ValueError(f"a rate is of the generalized delta rule, which removes by it, but needs are {needs!r}")
        self.feature_map, self.decay, self.needs = feature_map, decay, needs
        self.causal, self.normalize, self.scales_products = causal, normalize, feature_map.scales_products

    def _summarize(self, k: Keys, v: Values, key_mask: KeyMask) -> FeatureState:
        """Return S and z, whose size does not depend on m."""
        keys = group_features(self.feature_map.key(zero_masked(k, key_mask)), k.shape[1])
        return summarize_features(keys, v.unsqueeze(2), key_mask=group_mask(key_mask))

    def read(self, q: Queries, summary: FeatureState) -> Outputs:
        check_queries(q)
        sums = checked_kind(checked_kind(summary, FeatureState).sums, LinearState)
        queries = group_features(self.feature_map.query(q), sums.z.shape[1])
        return read_features(queries, summary, normalize=self.normalize).flatten(1, 2).to(q.dtype)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: FeatureState | None, key_mask: KeyMask, gates: Gates | None = None
    ) -> tuple[Outputs, FeatureState]:
        gate, beta = gates or Gates()
        q, k, v = present_heads(q, k, v, key_mask)
        v = v if beta is None else (v * beta.unsqueeze(-1)).to(v.dtype)
        queries, keys = (group_features(x, k.shape[1]) for x in (self.feature_map.query(q), self.feature_map.key(k)))
        if state is not None:
            check_sums(state, keys, v)
        y, state = causal_feature_attention(
            queries,
            keys,
            v.unsqueeze(2),
            state,
            log_decay=self.log_decay(gate, k.shape[1]),
            key_mask=group_mask(key_mask),
            normalize=self.normalize,
        )
        return y.flatten(1, 2), state

    def log_decay(self, gate: Tensor | None, num_key_heads: int) -> Tensor | None:
        """Return the fixed log decay (hk 1 1) plus the gate (b hk 1 n) or (b hk 1 n d), of which either may be None."""
        gate = None if gate is None else gate.unsqueeze(2)
        if self.decay is None:
            return gate
        own = self.decay().unsqueeze(-2)
        if len(own) != num_key_heads:
            raise ValueError(f"the decay was made for {len(own)} key heads, but there are {num_key_heads}")
        if gate is None:
            return own
        return gate + (own if gate.ndim == 4 else own.unsqueeze(-1))


def group_features(features: Features, num_key_heads: int) -> Features:
    """Return the features of queries (b h n f) as (b hk g n f), or of keys as (b hk 1 n f). Features are grouped and
    not their inputs, because the weights of a feature map may differ between heads."""
    if not isinstance(features, Features):
        checked_features("features", features)
    x, log_scale, function = features
    x = group_queries(x, num_key_heads)
    return Features(x, None if log_scale is None else log_scale.unflatten(1, (num_key_heads, -1)), function)


def check_sums(state: FeatureState, keys: Features, v: Values) -> None:
    """Raise ValueError unless the sums of a state have the shape and dtype for these keys and values."""
    sums = checked_kind(state.sums, LinearState)
    check_part("sums", sums.S, accumulator(v.dtype), v.shape[1], 1, keys.x.shape[-1], v.shape[-1])
