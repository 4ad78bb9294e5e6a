"""Segments of linear attention: sums over keys, with decays and with scales."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.base import group_mask
from linattn.attention.gates import AnyGates, Gates
from linattn.attention.linear import LinearAttention, group_features
from linattn.attention.rotary import count_positions
from linattn.attention.rotary_linear import RotaryLinearAttention, RotaryLinearAttentionState
from linattn.distributed.segments.base import checked_inputs, pieces, segment
from linattn.ops.features import Features, FeatureState, decay_per_token, summarize_features
from linattn.ops.linear import FORGETS, per_channel, summarize
from linattn.ops.numerics import accumulator, without_autocast, zero_masked
from linattn.ops.scale import running_scale
from linattn.ops.state import LinearState
from linattn.ops.tokens.cutting import cut, join
from linattn.ops.tokens.rotary import rotate_by, rotations
from linattn.types import KeyMask, Keys, Values

# tokens whose decays are added up by one product of matrices
CHUNK = 32


class LinearSegment(NamedTuple):
    """The map of some tokens for linear attention: state after = exp(Σ log decay) · state before + U. `state` is U;
    `log_decay` is Σ log decay (None: zero), one number per head or one per feature."""

    state: FeatureState
    log_decay: Float[Tensor, "b hk 1 e"] | None = None

    def after(self, state: FeatureState | None) -> FeatureState:
        (S, z), log_scale = self.state
        past = LinearState(S.new_zeros(()), z.new_zeros(())) if state is None else state.sums
        log_decay = self.log_decay
        if log_scale is not None:
            # a segment changes the scale as one token does, whose size is that of its largest key
            scale, log_decay, end = running_scale(log_scale, log_decay, None if state is None else state.log_scale)
            weight = (log_scale - scale).exp()
            S, z, log_scale = S * weight.unsqueeze(-1), z * weight, end
        if log_decay is not None:
            decay = log_decay.exp()
            past = LinearState(past.S * decay.unsqueeze(-1), past.z * decay)
        return FeatureState(LinearState(past.S + S, past.z + z), log_scale)


@segment.register
def _linear(
    module: LinearAttention, k: Keys, v: Values, *, key_mask: KeyMask = None, gates: AnyGates = None
) -> LinearSegment:
    gate, beta = checked_inputs(module, k, v, key_mask, gates) or Gates()
    k, v, key_mask = zero_masked(k, key_mask), zero_masked(v, key_mask), group_mask(key_mask)
    v = (v if beta is None else (v * beta.unsqueeze(-1)).to(v.dtype)).unsqueeze(2)
    keys = group_features(module.feature_map.key(k), k.shape[1])
    return linear_segment(keys, v, module.log_decay(gate, k.shape[1]), key_mask)


def linear_segment(
    keys: Features,
    v: Float[Tensor, "b hk 1 n dv"],
    log_decay: Float[Tensor, "..."] | None = None,
    key_mask: Bool[Tensor, "#b #hk 1 n"] | None = None,
) -> LinearSegment:
    """Return the map of tokens for `causal_feature_attention`, from its `keys` (b hk 1 n f) and options."""
    if log_decay is None:
        return LinearSegment(summarize_features(keys, v, key_mask=key_mask))
    if keys.log_scale is None and keys.function != "exp":
        return _sums_with_decays(keys, v, per_channel(keys.x, log_decay), key_mask)
    # unlike −∞, it may be multiplied by zero
    log_decay = decay_per_token(log_decay, keys.x, key_mask).clamp(min=FORGETS).expand(keys.x.shape[:-1])
    later, keys = _later_decays(log_decay.unsqueeze(-1)).squeeze(-1), keys.scalable()
    keys = keys._replace(log_scale=later if keys.log_scale is None else keys.log_scale + later)
    return LinearSegment(summarize_features(keys, v, key_mask=key_mask), log_decay.sum(-1, keepdim=True))


def _sums_with_decays(keys: Features, v: Tensor, log_decay: Tensor, key_mask: Tensor | None) -> LinearSegment:
    """Sum up features, each times exp(Σ log decay) of the later tokens, from the last tokens to the first. Exponents
    are sums and not differences, so none is positive, and sequences of a packed row stay apart."""
    dtype = accumulator(v.dtype)
    log_decay = log_decay.expand(*keys.x.shape[:-1], -1)
    S = v.new_zeros(*keys.x.shape[:3], keys.x.shape[-1], v.shape[-1], dtype=dtype)
    z, total = S[..., 0], S.new_zeros(*log_decay.shape[:3], 1, log_decay.shape[-1])
    with without_autocast(v):
        for x, values, decays, mask in reversed(list(pieces(keys.x, v, log_decay, key_mask))):
            decays = zero_masked(decays.to(dtype).clamp(min=FORGETS), mask)
            x = zero_masked(keys._replace(x=x).evaluated().x, mask) * _exp(_later_decays(decays) + total)
            S, z = S + x.mT @ values.to(dtype), z + x.sum(-2)
            total = total + decays.sum(-2, keepdim=True)
    return LinearSegment(FeatureState(LinearState(S, z), None), total.squeeze(-2))


def _later_decays(log_decay: Float[Tensor, "*b n e"]) -> Float[Tensor, "*b n e"]:
    """Return the sum of the finite log decays after each token."""
    chunks = cut(log_decay, CHUNK)
    # as a product, because a cumulative sum over rows takes ten times as long
    with without_autocast(chunks):
        inside = chunks.new_ones(CHUNK, CHUNK).triu(1) @ chunks
    after = F.pad(chunks.sum(-2), (0, 0, -1, 1)).flip(-2).cumsum(-2).flip(-2)
    return join(inside + after.unsqueeze(-2), log_decay.shape[-2])


def _exp(x: Tensor) -> Tensor:
    # on a CPU torch's exp2 takes a tenth to a third of the time of exp
    return (x * math.log2(math.e)).exp2()


class RotaryLinearSegment(NamedTuple):
    """U with rotations that begin at position 0. As R_{p+j} = R_p R_j, the sums turn by the position p before them."""

    state: RotaryLinearAttentionState
    base: float

    def after(self, state: RotaryLinearAttentionState | None) -> RotaryLinearAttentionState:
        if state is None:
            return self.state
        (S, z), denominator, count = self.state
        cos, sin = rotations(state.position.unsqueeze(-1), z.shape[-1], z.dtype, base=self.base)
        S, z = rotate_by(S.movedim(-1, 0), cos, sin).movedim(0, -1), rotate_by(z, cos, sin)
        numerator = LinearState(state.numerator.S + S, state.numerator.z + z)
        denominator = LinearState(*(x + y for x, y in zip(state.denominator, denominator, strict=True)))
        return RotaryLinearAttentionState(numerator, denominator, state.position + count)


@segment.register
def _rotary_linear(
    module: RotaryLinearAttention, k: Keys, v: Values, *, key_mask: KeyMask = None, gates: AnyGates = None
) -> RotaryLinearSegment:
    checked_inputs(module, k, v, key_mask, gates)
    k, v, mask = zero_masked(k, key_mask), zero_masked(v, key_mask), group_mask(key_mask)
    positions, count = count_positions(k, None, key_mask)
    dtype = accumulator(v.dtype)
    x, v = module.feature_map.key(k).value().to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)
    rotated = rotate_by(x, *rotations(positions.unsqueeze(2), x.shape[-1], dtype, base=module.base))
    terms = (rotated, v), (x, torch.ones_like(v[..., :1]))
    numerator, denominator = (summarize(*term, key_mask=mask) for term in terms)
    return RotaryLinearSegment(RotaryLinearAttentionState(numerator, denominator, count), module.base)
