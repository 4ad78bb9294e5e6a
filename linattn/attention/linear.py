"""Linear attention on split heads: any feature map around the one operator.
Katharopoulos et al., Transformers are RNNs, https://arxiv.org/abs/2006.16236"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.base import InnerAttention, group_queries
from linattn.attention.blindspot import RaggedState, attend_in_ragged_blocks
from linattn.attention.checks import check_keys, checked_heads
from linattn.attention.decay import Decay
from linattn.feature_maps.base import FeatureMap, checked_feature_map
from linattn.ops.arguments import NORMALIZATIONS, checked_decay
from linattn.ops.backends.base import accumulator
from linattn.ops.compaction import finite_queries, pack_heads, without
from linattn.ops.linear import ask, causal_linear_attention, summarize
from linattn.ops.names import unknown_name
from linattn.ops.scale import running_scale
from linattn.ops.state import LinearState, check_blindspot, check_part, checked_kind


class LinearAttentionState(NamedTuple):
    """The sums over the past; of exponential features, the logarithm of the largest, which tells what they are relative
    to: if causal, what `running_scale` makes of it, else itself."""

    sums: LinearState | RaggedState
    log_scale: Float[Tensor, "b hk 1 1"] | None


class _Keys(NamedTuple):
    """Features function(value) · exp(log_scale), (b hk 1 n f) and (b hk 1 n) or None. `size` is the logarithm of each
    token's largest, −inf where it is missing; None: they are in range by themselves."""

    value: Tensor
    log_scale: Tensor | None
    function: str
    size: Tensor | None

    def relative_to(self, top: Tensor | None) -> Tensor:
        """What the function is to be applied to, for features divided by exp(top)."""
        if top is None:
            return self.value
        if self.function == "exp":
            shift = top if self.log_scale is None else top - self.log_scale
            return self.value - shift.unsqueeze(-1)
        # in the scale's dtype, at least float32, as the scale may be small
        return self.value if self.log_scale is None else self.value * (self.log_scale - top).exp().unsqueeze(-1)


@final
class LinearAttention(InnerAttention):
    """y_i = φ(q_i) Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j), over all j or, if causal, over j ≤ i.

    `normalize` is as in `causal_linear_attention`; "default" is what the feature map asks for. `decay` makes the past
    fade; `blindspot` of B > 1 hides a query's own block of B present tokens. The causal state has constant size."""

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

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk m d"],
        v: Float[Tensor, "b hk m dv"],
        *,
        key_mask: Bool[Tensor, "#b #hk m"] | None = None,
    ) -> Float[Tensor, "b h n dv"]:
        if self.causal:
            return self.extend(q, k, v, key_mask=key_mask)[0]
        q, k, v, _ = checked_heads(q, k, v, key_mask)
        return self.ask(q, self.summarize(k, v, key_mask=key_mask)).to(v.dtype)

    def summarize(
        self,
        k: Float[Tensor, "b hk m d"],
        v: Float[Tensor, "b hk m dv"],
        *,
        key_mask: Bool[Tensor, "#b #hk m"] | None = None,
    ) -> LinearAttentionState:
        """S and z, of constant size."""
        self.check_not_causal()
        check_keys(k, v, key_mask)
        if key_mask is not None:
            k, v = without(k, key_mask), without(v, key_mask)
        key_mask, top = _for_groups(key_mask), None
        keys = self._keys(k, key_mask)
        if keys.size is not None:
            # −inf where there is no key, of a length of zero too
            top = F.pad(keys.size, (0, 1), value=-torch.inf).amax(-1, keepdim=True)
            top = top.masked_fill(top == -torch.inf, 0)
        sums = summarize(keys.relative_to(top), v.unsqueeze(2), key_mask=key_mask, feature_map=keys.function)
        return LinearAttentionState(sums, top)

    def ask(self, q: Float[Tensor, "b h n d"], summary: LinearAttentionState) -> Float[Tensor, "b h n dv"]:
        sums = checked_kind(checked_kind(summary, LinearAttentionState).sums, LinearState)
        features, q_scale, function = self._queries(q, sums.z.shape[1])
        y = ask(features, sums, normalize=self.normalize, feature_map=function)
        return self._unscaled(y, q_scale, summary.log_scale).flatten(1, 2).to(q.dtype)

    def extend(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk n d"],
        v: Float[Tensor, "b hk n dv"],
        state: LinearAttentionState | None = None,
        *,
        key_mask: Bool[Tensor, "#b #hk n"] | None = None,
    ) -> tuple[Float[Tensor, "b h n dv"], LinearAttentionState]:
        if not self.causal:
            return super().extend(q, k, v, state, key_mask=key_mask)
        q, k, v, state = checked_heads(q, k, v, key_mask, state, kind=LinearAttentionState, causal=True)
        ragged = state is not None and isinstance(state.sums, RaggedState)
        if self.blindspot > 1 and (key_mask is not None or ragged):
            return self._extend_ragged(q, k, v, state, key_mask)
        if key_mask is not None:
            q, k, v = finite_queries(q, key_mask), without(k, key_mask), without(v, key_mask)
        key_mask = _for_groups(key_mask)
        attend = partial(causal_linear_attention, key_mask=key_mask, normalize=self.normalize, blindspot=self.blindspot)
        return self._extend(q, k, v, state, key_mask, attend)

    def _extend_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearAttentionState | None, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearAttentionState]:
        """With a blindspot, and rows whose blocks begin at different places."""
        present = k.new_ones(k.shape[:-1], dtype=torch.bool) if key_mask is None else key_mask.expand(k.shape[:-1])
        packed = pack_heads(q, k, v, present)
        attend = partial(attend_in_ragged_blocks, total=packed.total, size=self.blindspot, normalize=self.normalize)
        y, state = self._extend(packed.q, packed.k, packed.v, state, packed.real.unsqueeze(2), attend)
        return packed.unpack(y), state

    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LinearAttentionState | None,
        key_mask: Tensor | None,
        attend: Callable[..., tuple[Tensor, LinearState | RaggedState]],
    ) -> tuple[Tensor, LinearAttentionState]:
        features, q_scale, function = self._queries(q, k.shape[1])
        keys, top, log_scale = self._keys(k, key_mask), None, None
        if state is not None:
            self._check_state(state, keys, v)
        log_decay = None if self.decay is None else self.decay().unsqueeze(-2)
        if keys.size is not None:
            log_decay = None if log_decay is None else checked_decay(log_decay)
            if log_decay is not None and key_mask is not None:
                log_decay = torch.where(key_mask, log_decay, 0)
            start = None if state is None else state.log_scale
            top, log_decay, log_scale = running_scale(keys.size, log_decay, start)
        past = None if state is None else state.sums
        y, sums = attend(
            features, keys.relative_to(top), v.unsqueeze(2), past, log_decay=log_decay, feature_map=function
        )
        y = self._unscaled(y, q_scale, top).flatten(1, 2).to(v.dtype)
        return y, LinearAttentionState(sums, log_scale)

    def _check_state(self, state: LinearAttentionState, keys: _Keys, v: Tensor) -> None:
        sums, dtype, hk = state.sums, accumulator(v.dtype), v.shape[1]
        check_blindspot(sums.blindspot, self.blindspot)
        seen = sums.seen if isinstance(sums, RaggedState) else checked_kind(sums, LinearState)
        check_part("sums", seen.S, dtype, hk, 1, keys.value.shape[-1], v.shape[-1])
        check_part("log_scale", state.log_scale, None if keys.size is None else dtype, hk, 1, 1)

    def _queries(self, q: Tensor, num_key_heads: int) -> tuple[Tensor, Tensor | None, str]:
        """What the operator's function is to be applied to (b hk g n f), and the logarithm of what is left out. Maps
        are applied while heads are split once, as they may have weights for each head; then queries are grouped."""
        if self.feature_map.elementwise is not None:
            return group_queries(q, num_key_heads), None, self.feature_map.elementwise
        if not self.feature_map.logarithmic:
            (q, scale), function = self.feature_map.scaled_query(q), "identity"
        else:
            (q, scale), function = self.feature_map.log_query(q), "exp"
            if self.normalize != "keys":
                # any constant gives the same product, so no gradient need flow through this one
                largest = q.detach().amax(-1).to(accumulator(q.dtype))
                q, scale = q - largest.unsqueeze(-1), largest if scale is None else largest + scale
            elif scale is not None:
                q, scale = q + scale.unsqueeze(-1), None
        scale = None if scale is None else scale.unflatten(1, (num_key_heads, -1))
        return group_queries(q, num_key_heads), scale, function

    def _keys(self, k: Tensor, key_mask: Tensor | None) -> _Keys:
        if self.feature_map.elementwise is not None:
            return _Keys(k.unsqueeze(2), None, self.feature_map.elementwise, None)
        logarithmic = self.feature_map.logarithmic
        k, scale = self.feature_map.log_key(k) if logarithmic else self.feature_map.scaled_key(k)
        k, scale, size = k.unsqueeze(2), None if scale is None else scale.unsqueeze(2), None
        if scale is not None and key_mask is not None:
            scale = torch.where(key_mask, scale, -torch.inf)
        if logarithmic:
            size = k.detach().amax(-1).to(accumulator(k.dtype))
            size = size if scale is None else size + scale.detach()
            size = size if key_mask is None else torch.where(key_mask, size, -torch.inf)
        elif scale is not None:
            size = scale.detach()
        return _Keys(k, scale, "exp" if logarithmic else "identity", size)

    def _unscaled(self, y: Tensor, q_scale: Tensor | None, top: Tensor | None) -> Tensor:
        """Of what was left out of features, an output normalised by its sum needs nothing, one whose features are each
        normalised by their own needs the queries', and any other all."""
        top = top if self.normalize is None else None
        scales = [scale for scale in (q_scale, top) if scale is not None and self.normalize != "output"]
        if not scales:
            return y
        return (y * sum(scales[1:], scales[0]).exp().unsqueeze(-1)).to(y.dtype)

    def extra_repr(self) -> str:
        return f"causal={self.causal}, normalize={self.normalize!r}, blindspot={self.blindspot}"


def _for_groups(key_mask: Tensor | None) -> Tensor | None:
    return None if key_mask is None else key_mask.unsqueeze(2)
