"""The generalized delta rule on split heads: a token removes what the state holds at one key, and writes with another.
Peng et al., RWKV-7, https://arxiv.org/abs/2503.14456"""

from collections.abc import Iterable
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.attention.base import InnerAttention, group_queries
from linattn.attention.delta import DeltaAttentionState
from linattn.attention.gates import GateNeeds, Gates
from linattn.checks import check_sizes, check_types
from linattn.feature_maps.base import unit
from linattn.ops.delta import causal_delta_attention
from linattn.ops.linear import FORGETS
from linattn.ops.nested import check_part
from linattn.ops.numerics import accumulator, is_readable, zero_masked
from linattn.ops.tokens.compaction import present_heads
from linattn.types import KeyMask, Keys, Outputs, Queries, Values

# the strongest log decay by which a removal key is divided: float16 holds the quotient
STRONGEST = -10.0


class Steps(NamedTuple):
    """Arguments of `causal_delta_attention`. A token is two there: the first lets the state fade and removes, and the
    second writes."""

    k: Float[Tensor, "b hk 1 2*n d"]
    v: Float[Tensor, "b hk 1 2*n dv"]
    beta: Float[Tensor, "#b hk 1 2*n"]
    log_decay: Float[Tensor, "#b hk 1 2*n d"]
    key_mask: Bool[Tensor, " b #hk 1 2*n"] | None
    removal_key: Float[Tensor, "b hk 1 2*n d"]


@final
class GeneralizedDeltaAttention(InnerAttention):
    """S_t = diag(α_t) S_{t−1} − (a_t ∘ r_t) r_tᵀ S_{t−1} + w_t v_tᵀ and y_t = S_tᵀ q_t / √d, always causal, for
    `num_key_heads` heads of `head_dim` = d channels.

    The gates are log α, at least −10 or −∞ (others raise ValueError on a CPU), and the rates a, between 0 and 1, both
    per channel. r = unit(ξ ∘ k) is the removal key, and w = k ∘ (1 + μ ∘ (a − 1)) the key that is written; ξ and μ are
    learned, per key head and channel.

    Where α is 0 a new sequence begins, and nothing is read from the state before."""

    causal = True
    state_kind = DeltaAttentionState
    needs = GateNeeds("channel", "rate")

    @check_types
    def __init__(self, num_key_heads: int, head_dim: int):
        super().__init__()
        check_sizes(num_key_heads=num_key_heads, head_dim=head_dim)
        self.removal_weight = nn.Parameter(torch.empty(num_key_heads, head_dim))
        self.write_weight = nn.Parameter(torch.empty(num_key_heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.removal_weight)
        nn.init.ones_(self.write_weight)

    def _extend(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        state: DeltaAttentionState | None,
        key_mask: KeyMask,
        gates: Gates | None = None,
    ) -> tuple[Outputs, DeltaAttentionState]:
        q, k, v = present_heads(q, k, v, key_mask)
        hk, d, dv = k.shape[1], k.shape[3], v.shape[3]
        if state is not None:
            check_part("S", state.S, accumulator(v.dtype), hk, 1, d, dv)
        assert gates is not None
        q = group_queries(q, hk)
        tensors = (pairs(torch.zeros_like(q), q), *self.steps(k, v, key_mask, gates))
        past = None if state is None else state.S
        if k.shape[-2] != 1:
            y, S = _delta(tensors, past)
            return y.unflatten(-2, (-1, 2))[..., 1, :].flatten(1, 2), DeltaAttentionState(S)
        # to generate, two calls of one token each are faster than one of two
        first, second = zip(*((None, None) if x is None else x.split(1, 3) for x in tensors), strict=True)
        y, S = _delta(second, _delta(first, past)[1])
        return y.flatten(1, 2), DeltaAttentionState(S)

    def steps(self, k: Keys, v: Values, key_mask: KeyMask, gates: Gates) -> Steps:
        (h, d), (hk, channels) = self.removal_weight.shape, (k.shape[1], k.shape[3])
        if (h, d) != (hk, channels):
            raise ValueError(f"made for {h} key heads of {d} channels, but there are {hk} of {channels}")
        assert gates.beta is not None and gates.log_decay is not None
        rate, log_decay = zero_masked(gates.beta, key_mask), zero_masked(gates.log_decay, key_mask)
        removal = unit(self.removal_weight.unsqueeze(1) * k)
        written = k * (1 + self.write_weight.unsqueeze(1) * (rate - 1))
        if is_readable(log_decay) and ((log_decay < STRONGEST) & (log_decay > FORGETS)).any():
            raise ValueError(
                f"log decays must be at least {STRONGEST:g}, or -inf where a sequence begins, as what they remove is "
                "read from the state before it fades"
            )
        # the operator reads the state after it has faded
        undone = log_decay.clamp(min=STRONGEST).neg().exp()
        beta = torch.ones_like(log_decay[..., 0]).repeat_interleave(2, -1)
        mask = None if key_mask is None else key_mask.repeat_interleave(2, -1)
        # with a dimension for the groups of query heads
        return Steps(
            pairs((rate * removal).to(k.dtype), written.to(k.dtype)).unsqueeze(2),
            pairs(torch.zeros_like(v), v).unsqueeze(2),
            beta.unsqueeze(2),
            pairs(log_decay, torch.zeros_like(log_decay)).unsqueeze(2),
            None if mask is None else mask.unsqueeze(2),
            pairs((removal * undone).to(k.dtype), torch.zeros_like(k)).unsqueeze(2),
        )


def _delta(tensors: Iterable[Any], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call `causal_delta_attention` with queries and `Steps`."""
    q, k, v, beta, log_decay, key_mask, removal_key = tensors
    options: Any = {"log_decay": log_decay, "key_mask": key_mask, "removal_key": removal_key}
    return causal_delta_attention(q, k, v, beta, state, scale=q.shape[-1] ** -0.5, **options)


def pairs(first: Tensor, second: Tensor) -> Tensor:
    """Return the tokens of two tensors (… n d) in turns, (… 2n d)."""
    return torch.stack([first, second], -2).flatten(-3, -2)
