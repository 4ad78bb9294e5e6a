"""Softmax attention, the baseline of all comparisons. Vaswani et al., https://arxiv.org/abs/1706.03762"""

from typing import final

from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.base import InnerAttention
from linattn.attention.checks import checked_heads
from linattn.ops.softmax import SoftmaxState, extend_softmax, softmax_attention


@final
class SoftmaxAttention(InnerAttention):
    """y_i = Σ_j softmax_j(q_i·k_j / √d) v_j, by torch's fused kernels: quadratic in time, linear in memory.

    Its state keeps every key and value, so both the state and the cost per token grow with the past. The states of the
    other attentions have constant size.
    """

    def __init__(self, *, causal: bool = False):
        super().__init__()
        self.causal = causal

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk m d"],
        v: Float[Tensor, "b hk m dv"],
        *,
        key_mask: Bool[Tensor, "#b #hk m"] | None = None,
    ) -> Float[Tensor, "b h n dv"]:
        q, k, v, _ = checked_heads(q, k, v, key_mask)
        return softmax_attention(q, k, v, causal=self.causal, key_mask=key_mask)

    def extend(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk n d"],
        v: Float[Tensor, "b hk n dv"],
        state: SoftmaxState | None = None,
        *,
        key_mask: Bool[Tensor, "#b #hk n"] | None = None,
    ) -> tuple[Float[Tensor, "b h n dv"], SoftmaxState]:
        if not self.causal:
            return super().extend(q, k, v, state, key_mask=key_mask)
        q, k, v, state = checked_heads(q, k, v, key_mask, state, kind=SoftmaxState, causal=True)
        return extend_softmax(q, k, v, state, key_mask=key_mask)

    def extra_repr(self) -> str:
        return f"causal={self.causal}"
