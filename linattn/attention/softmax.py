"""Softmax attention, the baseline of all comparisons. Vaswani et al., https://arxiv.org/abs/1706.03762"""

from typing import final

from linattn.attention.base import InnerAttention
from linattn.ops.softmax import SoftmaxState, extend_softmax, softmax_attention
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


@final
class SoftmaxAttention(InnerAttention):
    """y_i = Σ_j softmax_j(q_i·k_j / √d) v_j over all j or, if `causal`, over j ≤ i, by torch's fused kernels: quadratic
    in time, linear in memory.

    Its state keeps every key and value, so both the state and the cost per token grow with the past. The states of the
    other attentions have constant size.
    """

    state_kind = SoftmaxState

    def __init__(self, *, causal: bool = False):
        super().__init__()
        self.causal = causal

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        return softmax_attention(q, k, v, causal=self.causal, key_mask=key_mask)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: SoftmaxState | None, key_mask: KeyMask
    ) -> tuple[Outputs, SoftmaxState]:
        return extend_softmax(q, k, v, state, key_mask=key_mask)
