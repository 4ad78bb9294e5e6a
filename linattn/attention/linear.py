"""Linear attention on split heads: any feature map around the one operator.
Katharopoulos et al., Transformers are RNNs, https://arxiv.org/abs/2006.16236"""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.base import InnerAttention, group_queries
from linattn.attention.decay import Decay
from linattn.feature_maps.base import FeatureMap
from linattn.ops.linear import causal_linear_attention, linear_attention
from linattn.ops.scale import running_scale
from linattn.ops.state import LinearState


class LinearAttentionState(NamedTuple):
    """The sums over the past; of exponential features, the logarithm of what they are still to be multiplied by."""

    sums: LinearState
    log_scale: Float[Tensor, "b hk 1"] | None


class _Features(NamedTuple):
    """φ = value · exp(scale) of queries (b hk g n f) and keys (b hk 1 m f); or x, and the operator's name for φ."""

    q: Tensor
    q_scale: Tensor | None
    k: Tensor
    k_scale: Tensor | None
    name: str


@final
class LinearAttention(InnerAttention):
    """y_i = φ(q_i) Σ_j φ(k_j) v_jᵀ / φ(q_i)·Σ_j φ(k_j), over all j or, if causal, over j ≤ i.

    `normalize` is as in `causal_linear_attention`; "default" is what the feature map asks for. `decay` makes the past
    fade; `blindspot` of B > 1 hides a query's own block of B tokens. The causal state has constant size."""

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
        x, key_mask, top = self._features(q, k), _for_groups(key_mask), None
        features = x.k
        if x.k_scale is not None and k.shape[-2] > 0:
            k_scale = _of_present(x.k_scale, key_mask)
            top = k_scale.detach().amax(-1, keepdim=True)
            top = top.masked_fill(top == -torch.inf, 0)
            features = _scaled(x.k, k_scale - top)
        y = linear_attention(
            x.q, features, v.unsqueeze(2), key_mask=key_mask, normalize=self.normalize, feature_map=x.name
        )
        return self._unscaled(y, x.q_scale, top).flatten(1, 2).to(v.dtype)

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
        x, key_mask = self._features(q, k), _for_groups(key_mask)
        log_decay = None if self.decay is None else self.decay().unsqueeze(-2)
        features, top, log_scale = x.k, None, None
        if x.k_scale is not None:
            k_scale = _of_present(x.k_scale, key_mask)
            if log_decay is not None and key_mask is not None:
                log_decay = torch.where(key_mask, log_decay, 0)
            start = None if state is None else state.log_scale
            top, log_decay, log_scale = running_scale(k_scale, log_decay, start)
            features = _scaled(x.k, k_scale - top)
        y, sums = causal_linear_attention(
            x.q,
            features,
            v.unsqueeze(2),
            None if state is None else state.sums,
            log_decay=log_decay,
            key_mask=key_mask,
            normalize=self.normalize,
            feature_map=x.name,
            blindspot=self.blindspot,
        )
        return self._unscaled(y, x.q_scale, top).flatten(1, 2).to(v.dtype), LinearAttentionState(sums, log_scale)

    def _features(self, q: Tensor, k: Tensor) -> _Features:
        """Maps while heads are split once (maps may have weights for each head), then groups queries by key head."""
        hk, name = k.shape[1], self.feature_map.elementwise
        if name is not None:
            return _Features(group_queries(q, hk), None, k.unsqueeze(2), None, name)
        (q, q_scale), (k, k_scale) = self.feature_map.scaled_query(q), self.feature_map.scaled_key(k)
        q_scale = None if q_scale is None else q_scale.unflatten(1, (hk, -1))
        k_scale = None if k_scale is None else k_scale.unsqueeze(2)
        return _Features(group_queries(q, hk), q_scale, k.unsqueeze(2), k_scale, "identity")

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
