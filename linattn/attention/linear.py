"""Linear attention on split heads: any feature map around the one operator.
Katharopoulos et al., Transformers are RNNs, https://arxiv.org/abs/2006.16236"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from linattn.attention.base import InnerAttention, causal_view, group_mask, group_queries
from linattn.attention.blindspot import RaggedState, attend_in_ragged_blocks
from linattn.attention.decay import Decay
from linattn.feature_maps.base import FeatureMap, Features, checked_feature_map
from linattn.ops.arguments import NORMALIZATIONS, checked_decay
from linattn.ops.backends.base import accumulator
from linattn.ops.compaction import finite_queries, pack_heads, without
from linattn.ops.linear import causal_linear_attention, read, summarize
from linattn.ops.names import unknown_name
from linattn.ops.scale import running_scale
from linattn.ops.state import LinearState, check_blindspot, check_part, checked_kind
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class LinearAttentionState(NamedTuple):
    """The sums over the past. Sums of features with a scale are divided by exp(log_scale), or, if causal, by the
    exponential of what `running_scale` derives from it."""

    sums: LinearState | RaggedState
    log_scale: Float[Tensor, "b hk 1 1"] | None


@final
class LinearAttention(InnerAttention):
    """y_i = φ(q_i) Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j), over all j or, if causal, over j ≤ i.

    `normalize` is as in `causal_linear_attention`; "default" is the choice of the feature map. `decay` makes the past
    fade; `blindspot` of B > 1 hides a query's own block of B present tokens. The causal state has constant size."""

    state_kind = LinearAttentionState

    def __init__(
        self,
        feature_map: FeatureMap,
        *,
        causal: bool = False,
        normalize: str | None = "default",
        decay: Decay | None = None,
        blindspot: int = 1,
    ):
        super().__init__()
        feature_map = checked_feature_map(feature_map, FeatureMap)
        if not causal and (decay is not None or blindspot != 1):
            raise ValueError("decay and blindspot belong to causal attention, but causal is False")
        if blindspot < 1:
            raise ValueError(f"blindspot must be a number of tokens, at least 1, but is {blindspot}")
        normalize = feature_map.normalize if normalize == "default" else normalize
        if normalize not in NORMALIZATIONS:
            raise unknown_name("normalize", normalize, (*NORMALIZATIONS, "default"))
        self.feature_map, self.decay = feature_map, decay
        self.causal, self.normalize, self.blindspot = causal, normalize, blindspot

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        if self.causal:
            return self._extend(q, k, v, None, key_mask)[0]
        return self.read(q, self._summarize(k, v, key_mask)).to(v.dtype)

    def _summarize(self, k: Keys, v: Values, key_mask: KeyMask) -> LinearAttentionState:
        """Return S and z, whose size does not depend on m."""
        if key_mask is not None:
            k, v = without(k, key_mask), without(v, key_mask)
        key_mask, top = group_mask(key_mask), None
        keys, log_size = _per_key_head(self.feature_map.key(k).scalable(), key_mask)
        if log_size is not None:
            # the maximum over no keys is −inf, with a length of zero too
            top = F.pad(log_size, (0, 1), value=-torch.inf).amax(-1, keepdim=True)
            top = top.masked_fill(top == -torch.inf, 0)
        sums = summarize(keys.relative_to(top), v.unsqueeze(2), key_mask=key_mask, feature_map=keys.function)
        return LinearAttentionState(sums, top)

    def read(self, q: Queries, summary: LinearAttentionState) -> Outputs:
        sums = checked_kind(checked_kind(summary, LinearAttentionState).sums, LinearState)
        queries = self._per_group(self.feature_map.query(q), sums.z.shape[1])
        y = read(queries.x, sums, normalize=self.normalize, feature_map=queries.function)
        return self._rescaled(y, queries.log_scale, summary.log_scale).flatten(1, 2).to(q.dtype)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: LinearAttentionState | None, key_mask: KeyMask
    ) -> tuple[Outputs, LinearAttentionState]:
        ragged = state is not None and isinstance(state.sums, RaggedState)
        if self.blindspot > 1 and (key_mask is not None or ragged):
            return self._extend_ragged(q, k, v, state, key_mask)
        if key_mask is not None:
            q, k, v = finite_queries(q, key_mask), without(k, key_mask), without(v, key_mask)
        key_mask = group_mask(key_mask)
        attend = partial(causal_linear_attention, key_mask=key_mask, normalize=self.normalize, blindspot=self.blindspot)
        return self._extend_features(q, k, v, state, key_mask, attend)

    def _extend_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState | None, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearAttentionState]:
        """Attend with a blindspot where the blocks of each sequence begin at different tokens."""
        present = k.new_ones(k.shape[:-1], dtype=torch.bool) if key_mask is None else key_mask.expand(k.shape[:-1])
        packed = pack_heads(q, k, v, present)
        attend = partial(attend_in_ragged_blocks, total=packed.total, size=self.blindspot, normalize=self.normalize)
        y, state = self._extend_features(packed.q, packed.k, packed.v, state, packed.real.unsqueeze(2), attend)
        return packed.unpack(y), state

    def _extend_features(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LinearAttentionState | None,
        key_mask: Tensor | None,
        attend: Callable[..., tuple[Tensor, LinearState | RaggedState]],
    ) -> tuple[Tensor, LinearAttentionState]:
        queries, keys = self.feature_map.query(q), self.feature_map.key(k).scalable()
        if queries.function != keys.function:
            queries, keys = queries.evaluated(), keys.evaluated()
        queries, (keys, log_size) = self._per_group(queries, k.shape[1]), _per_key_head(keys, key_mask)
        if state is not None:
            self._check_state(state, keys, v, scaled=log_size is not None)
        top, log_scale = None, None
        log_decay = None if self.decay is None else self.decay().unsqueeze(-2)
        if log_size is not None:
            log_decay = None if log_decay is None else checked_decay(log_decay)
            if log_decay is not None and key_mask is not None:
                log_decay = torch.where(key_mask, log_decay, 0)
            start = None if state is None else state.log_scale
            top, log_decay, log_scale = running_scale(log_size, log_decay, start)
        past = None if state is None else state.sums
        y, sums = attend(
            queries.x, keys.relative_to(top), v.unsqueeze(2), past, log_decay=log_decay, feature_map=keys.function
        )
        y = self._rescaled(y, queries.log_scale, top).flatten(1, 2).to(v.dtype)
        return y, LinearAttentionState(sums, log_scale)

    def _check_state(self, state: LinearAttentionState, keys: Features, v: Tensor, *, scaled: bool) -> None:
        sums, dtype, hk = state.sums, accumulator(v.dtype), v.shape[1]
        check_blindspot(sums.blindspot, self.blindspot)
        seen = sums.seen if isinstance(sums, RaggedState) else checked_kind(sums, LinearState)
        check_part("sums", seen.S, dtype, hk, 1, keys.x.shape[-1], v.shape[-1])
        check_part("log_scale", state.log_scale, dtype if scaled else None, hk, 1, 1)

    def _per_group(self, queries: Features, num_key_heads: int) -> Features:
        """Group the queries by key head, (b hk g n f). Maps see them ungrouped, as they may have weights per head."""
        if self.normalize == "output":
            # the scale of a query cancels
            queries = queries._replace(log_scale=None)
        x, log_scale, function = queries
        if function != "exp" or self.normalize != "keys":
            x, log_scale, _ = queries.with_negative_exponents()
        elif log_scale is not None:
            x, log_scale = x + log_scale.unsqueeze(-1), None
        log_scale = None if log_scale is None else log_scale.unflatten(1, (num_key_heads, -1))
        return Features(group_queries(x, num_key_heads), log_scale, function)

    def _rescaled(self, y: Tensor, query_scale: Tensor | None, key_scale: Tensor | None) -> Tensor:
        """Multiply the scales back: none for "output", where they cancel; that of queries for "keys"; both for None."""
        scales = [query_scale] if self.normalize == "keys" else [query_scale, key_scale]
        scales = [scale for scale in scales if scale is not None]
        if not scales or self.normalize == "output":
            return y
        return (y * sum(scales[1:], scales[0]).exp().unsqueeze(-1)).to(y.dtype)

    def as_causal(self) -> "LinearAttention":
        return causal_view(self)

    def extra_repr(self) -> str:
        return f"causal={self.causal}, normalize={self.normalize!r}, blindspot={self.blindspot}"


def _per_key_head(keys: Features, key_mask: Tensor | None) -> tuple[Features, Tensor | None]:
    """Add the dimension of the group, (b hk 1 n f). The second result is `log_size`, −inf where a key is missing."""
    x, log_scale, function = keys
    log_scale = None if log_scale is None else log_scale.unsqueeze(2)
    if log_scale is not None and key_mask is not None:
        log_scale = torch.where(key_mask, log_scale, -torch.inf)
    keys = Features(x.unsqueeze(2), log_scale, function)
    log_size = keys.log_size()
    if log_size is not None and key_mask is not None:
        log_size = torch.where(key_mask, log_size, -torch.inf)
    return keys, log_size
