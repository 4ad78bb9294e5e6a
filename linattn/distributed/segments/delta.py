"""Segments of the delta rule."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.base import group_mask
from linattn.attention.delta import DeltaAttention, DeltaAttentionState
from linattn.attention.gates import AnyGates, Gates
from linattn.attention.generalized_delta import GeneralizedDeltaAttention
from linattn.distributed.segments.base import checked_inputs, pieces, segment
from linattn.feature_maps.base import unit
from linattn.ops.delta import causal_delta_attention
from linattn.ops.numerics import accumulator, without_autocast, zero_masked
from linattn.types import KeyMask, Keys, Values


class DeltaSegment(NamedTuple):
    """The map of some tokens for the delta rule: state after = T · state before + U."""

    T: Float[Tensor, "b hk 1 d d"]
    U: Float[Tensor, "b hk 1 d dv"]

    def after(self, state: DeltaAttentionState | None) -> DeltaAttentionState:
        if state is None:
            return DeltaAttentionState(self.U)
        with without_autocast(self.U):
            return DeltaAttentionState(self.T @ state.S + self.U)


@segment.register
def _delta(
    module: DeltaAttention, k: Keys, v: Values, *, key_mask: KeyMask = None, gates: AnyGates = None
) -> DeltaSegment:
    own: Gates = checked_inputs(module, k, v, key_mask, gates)
    log_decay, beta = (None if gate is None else gate.unsqueeze(2) for gate in own)
    k, v = zero_masked(k, key_mask), zero_masked(v, key_mask).unsqueeze(2)
    k = (unit(k) if module.unit_keys else k).unsqueeze(2)
    return delta_segment(k, v, beta, log_decay, group_mask(key_mask))


@segment.register
def _generalized_delta(
    module: GeneralizedDeltaAttention, k: Keys, v: Values, *, key_mask: KeyMask = None, gates: AnyGates = None
) -> DeltaSegment:
    own: Gates = checked_inputs(module, k, v, key_mask, gates)
    k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    return delta_segment(*module.steps(k, v, key_mask, own))


def delta_segment(
    k: Float[Tensor, "b hk 1 n d"],
    v: Float[Tensor, "b hk 1 n dv"],
    beta: Tensor | None,
    log_decay: Float[Tensor, "..."] | None = None,
    key_mask: Bool[Tensor, "#b #hk 1 n"] | None = None,
    removal_key: Float[Tensor, "b hk 1 n d"] | None = None,
) -> DeltaSegment:
    """Return the map of tokens for `causal_delta_attention`, with its options."""
    d, dv = k.shape[-1], v.shape[-1]
    maps = torch.eye(d, d + dv, dtype=accumulator(v.dtype), device=v.device).expand(*k.shape[:3], -1, -1)
    for keys, values, strengths, decays, mask, removal in pieces(k, v, beta, log_decay, key_mask, removal_key):
        # from the state [1 | 0], values [0 | v] lead to [T | U]; there are no queries, as nothing is read
        values, options = F.pad(values, (d, 0)), {"log_decay": decays, "key_mask": mask, "removal_key": removal}
        _, maps = causal_delta_attention(keys[:, :, :0], keys, values, strengths, maps, **options)
    return DeltaSegment(maps[..., :d].contiguous(), maps[..., d:].contiguous())
