"""Linear attention on split heads: any feature map around the one operator.
Katharopoulos et al., Transformers are RNNs, https://arxiv.org/abs/2006.16236"""

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from linattn.attention.base import InnerAttention, finite, group_mask, group_queries
from linattn.attention.decay import Decay
from linattn.attention.gates import GateNeeds, Gates, checked_needs
from linattn.feature_maps.base import FeatureMap, Features, checked_feature_map
from linattn.names import unknown_name
from linattn.ops.linear import NORMALIZATIONS, causal_linear_attention, checked_decay, read, summarize
from linattn.ops.nested import check_part, checked_kind
from linattn.ops.numerics import accumulator, present
from linattn.ops.scale import running_scale
from linattn.ops.state import LinearState
from linattn.ops.tokens.compaction import present_heads
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class LinearAttentionState(NamedTuple):
    """The sums over the past. Sums of features with a scale are divided by exp(log_scale), or, if causal, by the
    exponential of what `running_scale` derives from it."""

    sums: LinearState
    log_scale: Float[Tensor, "b hk 1 1"] | None


_Past = LinearAttentionState | None


@final
class LinearAttention(InnerAttention):
    """y_i = φ(q_i) Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j) with the φ of `feature_map`, over all j or, if `causal`, j ≤ i.

    `normalize` is as in `causal_linear_attention`; "default" is the choice of the feature map. `decay` makes the past
    fade at a fixed rate per head. `needs` names gates: their decay is per key head or, for maps without a scale per
    token, per feature; their write multiplies v and requires `normalize=None`. Without `causal`, both `decay` and
    `needs` raise ValueError. The causal state has constant size."""

    state_kind = LinearAttentionState

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
        if not causal and decay is not None:
            raise ValueError("a decay belongs to causal attention, but causal is False")
        normalize = feature_map.normalize if normalize == "default" else normalize
        if normalize not in NORMALIZATIONS:
            raise unknown_name("normalize", normalize, (*NORMALIZATIONS, "default"))
        if needs is not None and not causal:
            raise ValueError("gates belong to causal attention, but causal is False")
        if needs is not None and checked_needs(needs).write is not None and normalize is not None:
            raise ValueError(f"a write belongs to un-normalised attention, but normalize is {normalize!r}")
        self.feature_map, self.decay, self.needs = feature_map, decay, needs
        self.causal, self.normalize = causal, normalize

    def _summarize(self, k: Keys, v: Values, key_mask: KeyMask) -> LinearAttentionState:
        """Return S and z, whose size does not depend on m."""
        k, v = present(k, key_mask), present(v, key_mask)
        key_mask, top = group_mask(key_mask), None
        keys, log_size = per_key_head(self.feature_map.key(k).scalable(), key_mask)
        if log_size is not None:
            # the maximum over no keys is −inf, with a length of zero too
            top = finite(F.pad(log_size, (0, 1), value=-torch.inf).amax(-1, keepdim=True))
        sums = summarize(keys.relative_to(top), v.unsqueeze(2), key_mask=key_mask, feature_map=keys.function)
        return LinearAttentionState(sums, top)

    def read(self, q: Queries, summary: LinearAttentionState) -> Outputs:
        sums = checked_kind(checked_kind(summary, LinearAttentionState).sums, LinearState)
        queries = self.per_group(self.feature_map.query(q), sums.z.shape[1])
        y = read(queries.x, sums, normalize=self.normalize, feature_map=queries.function)
        return self.rescaled(y, queries.log_scale, summary.log_scale).flatten(1, 2).to(q.dtype)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: _Past, key_mask: KeyMask, gates: Gates | None = None
    ) -> tuple[Outputs, LinearAttentionState]:
        gate, beta = gates or Gates()
        q, k, v = present_heads(q, k, v, key_mask)
        v = v if beta is None else (v * beta.unsqueeze(-1)).to(v.dtype)
        key_mask = group_mask(key_mask)
        queries, keys = self.feature_map.query(q), self.feature_map.key(k).scalable()
        if queries.function != keys.function:
            queries, keys = queries.evaluated(), keys.evaluated()
        queries, (keys, log_size) = self.per_group(queries, k.shape[1]), per_key_head(keys, key_mask)
        if state is not None:
            self.check_state(state, keys, v, scaled=log_size is not None)
        sums, log_scale = state or (None, None)
        top, log_decay = None, self._log_decay(gate)
        if log_size is not None:
            if gate is not None and gate.ndim == k.ndim:
                raise ValueError(
                    f"{type(self.feature_map).__name__} keeps features in range by a scale per token, which channels "
                    "that fade by themselves would not share: give it a decay per head"
                )
            log_decay = None if log_decay is None else checked_decay(log_decay)
            if log_decay is not None and key_mask is not None:
                log_decay = torch.where(key_mask, log_decay, 0)
            top, log_decay, log_scale = running_scale(log_size, log_decay, log_scale)
        y, sums = causal_linear_attention(
            queries.x,
            keys.relative_to(top),
            v.unsqueeze(2),
            sums,
            log_decay=log_decay,
            key_mask=key_mask,
            normalize=self.normalize,
            feature_map=keys.function,
        )
        y = self.rescaled(y, queries.log_scale, top).flatten(1, 2).to(v.dtype)
        return y, LinearAttentionState(sums, log_scale)

    def _log_decay(self, gate: Tensor | None) -> Tensor | None:
        """Return the decay, (hk 1 1), of the gate, (b hk 1 n) or (b hk 1 n d), or both."""
        gate = None if gate is None else gate.unsqueeze(2)
        if self.decay is None:
            return gate
        own = self.decay().unsqueeze(-2)
        if gate is None:
            return own
        return gate + (own if gate.ndim == 4 else own.unsqueeze(-1))

    def check_state(self, state: LinearAttentionState, keys: Features, v: Tensor, *, scaled: bool) -> None:
        sums, dtype, hk = checked_kind(state.sums, LinearState), accumulator(v.dtype), v.shape[1]
        check_part("sums", sums.S, dtype, hk, 1, keys.x.shape[-1], v.shape[-1])
        check_part("log_scale", state.log_scale, dtype if scaled else None, hk, 1, 1)

    def per_group(self, queries: Features, num_key_heads: int) -> Features:
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

    def rescaled(self, y: Tensor, query_scale: Tensor | None, key_scale: Tensor | None) -> Tensor:
        """Multiply the scales back: none for "output", where they cancel; that of queries for "keys"; both for None."""
        scales = [query_scale] if self.normalize == "keys" else [query_scale, key_scale]
        scales = [scale for scale in scales if scale is not None]
        if not scales or self.normalize == "output":
            return y
        return (y * sum(scales[1:], scales[0]).exp().unsqueeze(-1)).to(y.dtype)


def per_key_head(keys: Features, key_mask: Tensor | None) -> tuple[Features, Tensor | None]:
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
