"""Softmax attention, the baseline of all comparisons. Vaswani et al., https://arxiv.org/abs/1706.03762"""

from typing import final

import torch

from linattn.attention.base import InnerAttention, KeysAndValues
from linattn.checks import check_types
from linattn.ops.nested import check_tokens
from linattn.ops.softmax.kernel import among_present, fused_softmax, softmax_attention
from linattn.ops.tokens.compaction import join_masks, per_query_head, present_heads
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


@final
class SoftmaxAttention(InnerAttention):
    """y_i = Σ_j softmax_j(q_i·k_j / √d) v_j over all j or, if `causal`, over j ≤ i, by torch's fused kernels: quadratic
    in time, linear in memory.

    Its state keeps every key and value, so both the state and the cost per token grow with the past. The states of the
    other attentions have constant size."""

    state_kind = KeysAndValues
    scales_products = True

    @check_types
    def __init__(self, *, causal: bool = False):
        super().__init__()
        self.causal = causal

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        return softmax_attention(q, k, v, causal=self.causal, key_mask=key_mask)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: KeysAndValues | None, key_mask: KeyMask
    ) -> tuple[Outputs, KeysAndValues]:
        if key_mask is not None:
            key_mask = key_mask.expand(k.shape[0], -1, -1)
            q, k, v = present_heads(q, k, v, key_mask)
        if state is None:
            return self._attend(q, k, v, key_mask), KeysAndValues(k, v, key_mask)
        check_tokens(state.k, state.v, k, v, state.k.shape[2])
        mask = join_masks(state.k, state.key_mask, k, key_mask)
        state = KeysAndValues(torch.cat([state.k, k], -2), torch.cat([state.v, v], -2), mask)
        n, m = q.shape[-2], state.k.shape[-2]
        if n == 1 and mask is None:
            return fused_softmax(q, state.k, state.v), state
        i, j = torch.arange(m - n, m, device=q.device)[:, None], torch.arange(m, device=q.device)
        visible = j <= i
        if mask is not None:
            visible = among_present(visible, mask, i == j, q.shape[1])
        y = fused_softmax(q, state.k, state.v, visible=visible)
        if key_mask is not None:
            y = torch.where(per_query_head(key_mask, q.shape[1]).unsqueeze(-1), y, 0)
        return y, state
