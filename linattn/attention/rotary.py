"""Rotary positions before an inner attention, for some heads of a mixture; `MultiheadAttention` has an option for all.
Su et al., RoFormer, https://arxiv.org/abs/2104.09864, eq. 34"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.attention.base import InnerAttention, checked_inner
from linattn.attention.checks import checked_heads
from linattn.ops.compaction import per_query_head
from linattn.ops.rotary import rotate
from linattn.ops.state import check_part


class RotaryState(NamedTuple):
    """The state of the inner attention and the number of tokens seen."""

    inner: Any
    position: Int[Tensor, "b hk 1"]


@final
class RotaryAttention(InnerAttention):
    """inner(R_i q_i, R_j k_j, v_j): rotates queries and keys, which are those of the same tokens, by their positions.

    q·k then depends on i − j alone, and so does softmax attention. A feature map sees channels, so with one the output
    depends on absolute positions too. Masked tokens have no position."""

    def __init__(self, inner: InnerAttention, *, base: float = 10000.0):
        super().__init__()
        self.inner, self.base, self.causal = checked_inner(inner), base, inner.causal

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk n d"],
        v: Float[Tensor, "b hk n dv"],
        *,
        key_mask: Bool[Tensor, "#b #hk n"] | None = None,
    ) -> Float[Tensor, "b h n dv"]:
        q, k, v, _ = checked_heads(q, k, v, key_mask)
        q, k = self._rotated(q, k, count_places(k, key_mask, 0))
        return self.inner(q, k, v, key_mask=key_mask)

    def extend(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk n d"],
        v: Float[Tensor, "b hk n dv"],
        state: RotaryState | None = None,
        *,
        key_mask: Bool[Tensor, "#b #hk n"] | None = None,
    ) -> tuple[Float[Tensor, "b h n dv"], RotaryState]:
        if not self.causal:
            return super().extend(q, k, v, state, key_mask=key_mask)
        q, k, v, state = checked_heads(q, k, v, key_mask, state, kind=RotaryState, causal=True)
        if state is None:
            seen = torch.zeros(*k.shape[:2], 1, dtype=torch.int64, device=k.device)
        else:
            seen = state.position
            check_part("position", seen, torch.int64, k.shape[1], 1)
        places = count_places(k, key_mask, seen)
        q, k = self._rotated(q, k, places)
        y, inner = self.inner.extend(q, k, v, state and state.inner, key_mask=key_mask)
        arrived = k.shape[-2] if key_mask is None else key_mask.sum(-1, keepdim=True)
        return y, RotaryState(inner, seen + arrived)

    def _rotated(self, q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(
                f"queries and keys must be those of the same tokens, but there are {q.shape[-2]} and {k.shape[-2]}"
            )
        of_queries = per_query_head(places, q.shape[1])
        return rotate(q, of_queries, base=self.base), rotate(k, places, base=self.base)

    def extra_repr(self) -> str:
        return f"base={self.base}"


def count_places(
    k: Float[Tensor, "b hk n d"], key_mask: Bool[Tensor, "#b #hk n"] | None, seen: Int[Tensor, "b hk 1"] | int
) -> Int[Tensor, "b hk n"]:
    """Return the position of each token, the number of present tokens before it."""
    present = torch.ones(k.shape[:-1], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    return (present.expand(k.shape[:-1]).cumsum(-1) - 1 + seen).clamp(min=0)
