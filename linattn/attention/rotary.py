"""Rotary positions before an inner attention, for some heads of a mixture; `MultiheadAttention` has an option for all.
Su et al., RoFormer, https://arxiv.org/abs/2104.09864, eq. 34"""

from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.attention.base import InnerAttention, checked_inner
from linattn.attention.gates import AnyGates
from linattn.checks import check_numbers, check_types
from linattn.ops.nested import check_part
from linattn.ops.tokens.compaction import per_query_head
from linattn.ops.tokens.rotary import rotate_by, rotations
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


class RotaryState(NamedTuple):
    """The state of the inner attention and the number of tokens seen."""

    inner: Any
    position: Int[Tensor, "b hk"]


@final
class RotaryAttention(InnerAttention):
    """inner(R_i q_i, R_j k_j, v_j) for self-attention: rotates queries and keys by their positions, before `inner` gets
    them: channels c and c + ⌊d/2⌋ by the angle i · base^(−c/⌊d/2⌋), so that a larger `base` rotates more slowly.

    q·k then depends on i − j alone, and so does softmax attention. A feature map takes single channels as inputs, so
    linear attention depends on absolute positions too. Masked tokens have no position."""

    state_kind = RotaryState
    same_tokens = True

    @check_types
    def __init__(self, inner: InnerAttention, *, base: float = 10000.0):
        super().__init__()
        check_numbers(least=1.0, base=base)
        self.inner, self.base, self.causal = checked_inner(inner), base, inner.causal
        self.needs, self.scales_products = inner.needs, inner.scales_products

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        q, k, _ = self._rotated(q, k, None, key_mask)
        return self.inner(q, k, v, key_mask=key_mask)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: RotaryState | None, key_mask: KeyMask, gates: AnyGates = None
    ) -> tuple[Outputs, RotaryState]:
        if state is not None:
            check_part("position", state.position, torch.int64, k.shape[1])
        q, k, position = self._rotated(q, k, state and state.position, key_mask)
        y, inner = self.inner.extend(q, k, v, state and state.inner, key_mask=key_mask, gates=gates)
        return y, RotaryState(inner, position)

    def _rotated(self, q: Tensor, k: Tensor, start: Tensor | None, key_mask: KeyMask) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k rotated, and the number of tokens so far, with theirs; `start` is the number before them."""
        positions, end = count_positions(k, start, key_mask)
        rotation = rotations(positions, k.shape[-1], k.dtype, base=self.base)
        of_queries = (per_query_head(x, q.shape[1]) for x in rotation)
        return rotate_by(q, *of_queries), rotate_by(k, *rotation), end


def count_positions(
    x: Float[Tensor, "*b n d"], start: Int[Tensor, "*b"] | None, key_mask: Bool[Tensor, "*#b n"] | None
) -> tuple[Int[Tensor, "*#b n"], Int[Tensor, "*b"]]:
    """Return the position of each token of x, and the number of tokens up to the end of x; `start` is the number of
    those before x (None: zero). Only present tokens count."""
    *lead, n, _ = x.shape
    if start is None:
        # all sequences share these positions, and so the angles of a rotation
        start = torch.zeros([1] * len(lead), dtype=torch.int64, device=x.device)
    first, seen = start.unsqueeze(-1), start.expand(lead)
    if key_mask is None:
        return first + torch.arange(n, device=x.device), seen + n
    # missing tokens before the first present one would get position -1, which no table of positions holds
    return (first + key_mask.cumsum(-1) - 1).clamp(min=0), seen + key_mask.sum(-1)
