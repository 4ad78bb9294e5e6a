"""Softmax attention in a window. Most mixtures pair it with linear attention, which covers the rest of the sequence.
Roy et al., https://arxiv.org/abs/2003.05997 (buckets); Beltagy et al., https://arxiv.org/abs/2004.05150 (sliding)"""

from typing import final

from linattn.attention.base import InnerAttention
from linattn.checks import check_sizes, check_types
from linattn.ops.softmax.local import LocalState, Window, extend_local, local_attention
from linattn.types import KeyMask, Keys, Outputs, Queries, Values


@final
class LocalAttention(InnerAttention):
    """y_i = Σ_j softmax_j(q_i·k_j / √d) v_j over the keys j in the window of i.

    If `causal`, the window is i − window < j ≤ i, the last `window` tokens with i itself; if not, |i − j| < window.
    With `bucketed`, as in local-attention, the sequence is cut into buckets of `window` tokens. Token i then sees its
    own bucket and both neighbours, or, if causal, the previous bucket and its own up to itself: between window + 1 and
    2 · window keys once the first bucket is full.

    A masked token is a missing token, as key and as query: windows count present tokens only, and its output is zeros.
    The state holds the last window − 1 (bucketed: 2 · window − 1) present keys and values per sequence."""

    state_kind = LocalState
    scales_products = True
    same_tokens = True

    @check_types
    def __init__(self, window: int, *, causal: bool = False, bucketed: bool = False):
        super().__init__()
        check_sizes(window=window)
        self.size, self.causal, self.bucketed = window, causal, bucketed

    @property
    def window(self) -> Window:
        return Window(self.size, self.causal, self.bucketed)

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        return local_attention(q, k, v, window=self.window, key_mask=key_mask)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: LocalState | None, key_mask: KeyMask
    ) -> tuple[Outputs, LocalState]:
        return extend_local(q, k, v, state, window=self.window, key_mask=key_mask)
