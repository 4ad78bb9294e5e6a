"""Mixtures of attentions, in which groups of heads attend in different ways."""

from typing import Any, cast, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linattn.attention.base import InnerAttention, checked_inner
from linattn.attention.checks import check_keys, checked_heads
from linattn.ops.state import checked_parts


@final
class SplitHeads(InnerAttention):
    """Splits the heads: in `SplitHeads((4, local), (4, linear))` the first four query heads are local, the rest linear.

    Key heads, if there are fewer, are split in the same proportion. The state is a tuple with the state of each part.
    """

    def __init__(self, *parts: tuple[int, InnerAttention]):
        super().__init__()
        if not parts or any(count < 1 for count, _ in parts):
            raise ValueError(f"each part needs at least one head, but the heads are {[count for count, _ in parts]}")
        if len({checked_inner(part).causal for _, part in parts}) > 1:
            kinds = ", ".join(f"{type(part).__name__}(causal={part.causal})" for _, part in parts)
            raise ValueError(f"either all parts are causal or none, but they are {kinds}")
        self.heads = tuple(count for count, _ in parts)
        self.parts = nn.ModuleList(part for _, part in parts)
        self.causal = parts[0][1].causal

    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk m d"],
        v: Float[Tensor, "b hk m dv"],
        *,
        key_mask: Bool[Tensor, "#b #hk m"] | None = None,
    ) -> Float[Tensor, "b h n dv"]:
        q, k, v, _ = checked_heads(q, k, v, key_mask)
        pieces = zip(self.parts, *self._split(q, k, v, key_mask), strict=True)
        return torch.cat([part(*piece, key_mask=mask) for part, *piece, mask in pieces], 1)

    def extend(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b hk n d"],
        v: Float[Tensor, "b hk n dv"],
        state: tuple[Any, ...] | None = None,
        *,
        key_mask: Bool[Tensor, "#b #hk n"] | None = None,
    ) -> tuple[Float[Tensor, "b h n dv"], tuple[Any, ...]]:
        if not self.causal:
            return super().extend(q, k, v, state, key_mask=key_mask)
        past = None if state is None else checked_parts(state, len(self.parts))
        q, k, v, past = checked_heads(q, k, v, key_mask, past, causal=True)
        states = checked_parts(past, len(self.parts))
        pieces = zip(self.parts, states, *self._split(q, k, v, key_mask), strict=True)
        ys, states = zip(
            *(part.extend(*piece, past, key_mask=mask) for part, past, *piece, mask in pieces), strict=True
        )
        return torch.cat(ys, 1), states

    def summarize(
        self,
        k: Float[Tensor, "b hk m d"],
        v: Float[Tensor, "b hk m dv"],
        *,
        key_mask: Bool[Tensor, "#b #hk m"] | None = None,
    ) -> tuple[Any, ...]:
        """Return a tuple with the summary of each part."""
        self.check_not_causal()
        check_keys(k, v, key_mask)
        pieces = zip(self.parts, *self._split_keys(k, v, key_mask), strict=True)
        return tuple(cast(InnerAttention, part).summarize(*piece, key_mask=mask) for part, *piece, mask in pieces)

    def read(self, q: Float[Tensor, "b h n d"], summary: tuple[Any, ...]) -> Float[Tensor, "b h n dv"]:
        pieces = zip(self.parts, self._split_queries(q), checked_parts(summary, len(self.parts)), strict=True)
        return torch.cat([cast(InnerAttention, part).read(piece, kept) for part, piece, kept in pieces], 1)

    def _split(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Any, ...]:
        """Return queries, keys, values and masks, each as a tuple over the parts."""
        return self._split_queries(q), *self._split_keys(k, v, key_mask)

    def _split_queries(self, q: Tensor) -> tuple[Tensor, ...]:
        if q.shape[1] != sum(self.heads):
            raise ValueError(f"made for {self.heads}, together {sum(self.heads)} heads, but there are {q.shape[1]}")
        return q.split(self.heads, 1)

    def _split_keys(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Any, ...]:
        total, hk = sum(self.heads), k.shape[1]
        if any(count * hk % total for count in self.heads):
            raise ValueError(
                f"key heads must split in the same proportion as the query heads, {self.heads}, but there are {hk}"
            )
        key_heads = [count * hk // total for count in self.heads]
        if key_mask is None or key_mask.shape[1] == 1:
            masks: Any = (key_mask,) * len(self.heads)
        else:
            masks = key_mask.split(key_heads, 1)
        return k.split(key_heads, 1), v.split(key_heads, 1), masks

    def extra_repr(self) -> str:
        return f"heads={self.heads}"
