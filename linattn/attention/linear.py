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
from linattn.attention.decay import Decay
from linattn.feature_maps.base import FeatureMap
from linattn.ops.compaction import pack_heads
from linattn.ops.linear import ask, causal_linear_attention, summarize
from linattn.ops.scale import running_scale
from linattn.ops.state import LinearState


class LinearAttentionState(NamedTuple):
    """The sums over the past; of exponential features, the logarithm of what they are still to be multiplied by."""

    sums: LinearState | RaggedState
    log_scale: Float[Tensor, "b hk 1"] | None


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
        if not causal and (decay is not None or blindspot != 1):
            raise ValueError("decay and blindspot belong to causal attention, but causal is False")
        if blindspot < 1:
            raise ValueError(f"blindspot must be a number of tokens, at least 1, but is {blindspot}")
        normalize = feature_map.normalize if normalize == "default" else normalize
        if normalize not in ("output", "keys", None):
            raise ValueError(f'normalize must be "output", "keys", None or "default", but is {normalize!r}')
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
        (features, k_scale, name), key_mask, top = self._keys(k), _for_groups(key_mask), None
        if k_scale is not None:
            k_scale = _of_present(k_scale, key_mask)
            # −inf where there is no key, of a length of zero too
            top = F.pad(k_scale.detach(), (0, 1), value=-torch.inf).amax(-1, keepdim=True)
            top = top.masked_fill(top == -torch.inf, 0)
            features = _scaled(features, k_scale - top)
        sums = summarize(features, v.unsqueeze(2), key_mask=key_mask, feature_map=name)
        return LinearAttentionState(sums, top)

    def ask(self, q: Float[Tensor, "b h n d"], summary: LinearAttentionState) -> Float[Tensor, "b h n dv"]:
        assert isinstance(summary.sums, LinearState)
        features, q_scale, name = self._queries(q, summary.sums.z.shape[1])
        y = ask(features, summary.sums, normalize=self.normalize, feature_map=name)
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
        ragged = state is not None and isinstance(state.sums, RaggedState)
        if self.blindspot > 1 and (key_mask is not None or ragged):
            return self._extend_ragged(q, k, v, state, key_mask)
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
        q_features, q_scale, name = self._queries(q, k.shape[1])
        features, k_scale, _ = self._keys(k)
        top, log_scale = None, None
        log_decay = None if self.decay is None else self.decay().unsqueeze(-2)
        if k_scale is not None:
            k_scale = _of_present(k_scale, key_mask)
            if log_decay is not None and key_mask is not None:
                log_decay = torch.where(key_mask, log_decay, 0)
            start = None if state is None else state.log_scale
            top, log_decay, log_scale = running_scale(k_scale, log_decay, start)
            features = _scaled(features, k_scale - top)
        past = None if state is None else state.sums
        y, sums = attend(q_features, features, v.unsqueeze(2), past, log_decay=log_decay, feature_map=name)
        return self._unscaled(y, q_scale, top).flatten(1, 2).to(v.dtype), LinearAttentionState(sums, log_scale)

    def _queries(self, q: Tensor, num_key_heads: int) -> tuple[Tensor, Tensor | None, str]:
        """Features (b hk g n f), their scale, and the operator's name for φ. Maps are applied while heads are split
        once, as they may have weights for each head; then queries are grouped by key head."""
        if self.feature_map.elementwise is not None:
            return group_queries(q, num_key_heads), None, self.feature_map.elementwise
        q, scale = self.feature_map.scaled_query(q)
        scale = None if scale is None else scale.unflatten(1, (num_key_heads, -1))
        return group_queries(q, num_key_heads), scale, "identity"

    def _keys(self, k: Tensor) -> tuple[Tensor, Tensor | None, str]:
        """Features (b hk 1 m f) likewise."""
        if self.feature_map.elementwise is not None:
            return k.unsqueeze(2), None, self.feature_map.elementwise
        k, scale = self.feature_map.scaled_key(k)
        return k.unsqueeze(2), None if scale is None else scale.unsqueeze(2), "identity"

    def _unscaled(self, y: Tensor, q_scale: Tensor | None, top: Tensor | None) -> Tensor:
        """What was left out of features does not matter to a normalised output; any other is multiplied by it."""
        scales = [scale for scale in (q_scale, top) if scale is not None]
        if self.normalize is not None or not scales:
            return y
        return (y * sum(scales[1:], scales[0]).exp().unsqueeze(-1)).to(y.dtype)

    def extra_repr(self) -> str:
        return f"causal={self.causal}, normalize={self.normalize!r}, blindspot={self.blindspot}"


def _for_groups(key_mask: Tensor | None) -> Tensor | None:
    return None if key_mask is None else key_mask.unsqueeze(2)


def _of_present(log_scale: Tensor, key_mask: Tensor | None) -> Tensor:
    return log_scale if key_mask is None else torch.where(key_mask, log_scale, -torch.inf)


def _scaled(features: Tensor, log_scale: Tensor) -> Tensor:
    """In the scale's dtype, at least float32, as the scale may be small."""
    return features * log_scale.exp().unsqueeze(-1)
