"""The delta rule on split heads: each token writes the difference between its value and the state's prediction for its
key, so that a key can be overwritten. Yang et al., https://arxiv.org/abs/2406.06484 (DeltaNet),
https://arxiv.org/abs/2412.06464 (gated DeltaNet); Kimi Team, https://arxiv.org/abs/2510.26692 (KDA)"""

from typing import NamedTuple, final

from jaxtyping import Float
from torch import Tensor

from linattn.attention.base import InnerAttention, group_mask, group_queries
from linattn.attention.gates import GateNeeds, Gates, checked_needs
from linattn.checks import check_types
from linattn.feature_maps.base import unit
from linattn.ops.delta import causal_delta_attention
from linattn.ops.nested import check_part
from linattn.ops.numerics import accumulator
from linattn.ops.tokens.compaction import present_heads
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class DeltaAttentionState(NamedTuple):
    """S predicts values: Sᵀ k is near the last value that was written with the key k."""

    S: Float[Tensor, "b hk 1 d dv"]


_Past = DeltaAttentionState | None


@final
class DeltaAttention(InnerAttention):
    """S_t = diag(α_t) S_{t−1} + β_t k_t (v_t − (diag(α_t) S_{t−1})ᵀ k_t)ᵀ and y_t = S_tᵀ q_t / √d, always causal.

    The gates are β per key head and token, and log α per key head or per channel as `decay` says, "head" (gated
    DeltaNet), "channel" (KDA) or None (DeltaNet, α = 1). Queries and keys are divided by their lengths first, because
    states grow where β|k|² > 2; with `unit_keys=False` the caller must keep keys short. A zero vector stays zero."""

    causal = True
    state_kind = DeltaAttentionState

    @check_types
    def __init__(self, *, decay: str | None = None, unit_keys: bool = True):
        super().__init__()
        self.needs = checked_needs(GateNeeds(decay, "strength"))
        self.decay, self.unit_keys = decay, unit_keys

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: _Past, key_mask: KeyMask, gates: Gates | None = None
    ) -> tuple[Outputs, DeltaAttentionState]:
        q, k, v = present_heads(q, k, v, key_mask)
        hk, d, dv = k.shape[1], k.shape[3], v.shape[3]
        if state is not None:
            check_part("S", state.S, accumulator(v.dtype), hk, 1, d, dv)
        if self.unit_keys:
            q, k = unit(q), unit(k)
        assert gates is not None and gates.beta is not None
        y, S = causal_delta_attention(
            group_queries(q, hk),
            k.unsqueeze(2),
            v.unsqueeze(2),
            gates.beta.unsqueeze(2),
            None if state is None else state.S,
            log_decay=None if gates.log_decay is None else gates.log_decay.unsqueeze(2),
            key_mask=group_mask(key_mask),
            scale=d**-0.5,
        )
        return y.flatten(1, 2), DeltaAttentionState(S)
