"""Softmax attention in a window. Most mixtures pair it with linear attention, which covers the rest of the sequence.
Roy et al., https://arxiv.org/abs/2003.05997 (buckets); Beltagy et al., https://arxiv.org/abs/2004.05150 (sliding)"""

from typing import final

from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.base import InnerAttention
from linattn.attention.checks import checked_heads
from linattn.ops.local import LocalState, Window, extend_local, local_attention


@final
class LocalAttention(InnerAttention):
    """y_i = Σ_j softmax_j(q_i·k_j / √d) v_j over the keys j in the window of i.

    If causal, the window is i − window < j ≤ i, the last `window` tokens with i itself; if not, |i − j| < window. With
    `bucketed`, as in local-attention, the sequence is cut into buckets of `window` tokens. Token i then sees its own
    bucket and both neighbours, or, if causal, the previous bucket and its own up to itself: between window + 1 and
    2 · window keys once the first bucket is full.

    A masked token is a missing token, as key and as query: windows count present tokens only, and its output is zeros.
    The state holds the last window − 1 (bucketed: 2 · window − 1) present keys and values per sequence.
    """

    def __init__(self, window: int, *, causal: bool = False, bucketed: bool = False):
        super().__init__()
        if window < 1:
            raise ValueError(f"a window holds at least one token, but window is {window}")
        self.window = Window(window, causal, bucketed)
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
        return local_attention(q, k, v, window=self.window, key_mask=key_mask)

    def extend(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk n d"],
        v: Float[Tensor, "b hk n dv"],
        state: LocalState | None = None,
        *,
        key_mask: Bool[Tensor, "#b #hk n"] | None = None,
    ) -> tuple[Float[Tensor, "b h n dv"], LocalState]:
        if not self.causal:
            return super().extend(q, k, v, state, key_mask=key_mask)
        q, k, v, state = checked_heads(q, k, v, key_mask, state, kind=LocalState, causal=True)
        return extend_local(q, k, v, state, window=self.window, key_mask=key_mask)

    def extra_repr(self) -> str:
        return f"{self.window.size}, causal={self.causal}, bucketed={self.window.bucketed}"
