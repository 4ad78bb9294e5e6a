"""Mixtures of attentions, in which groups of heads attend in different ways."""

from typing import Any, cast, final

import torch
from torch import Tensor, nn

from linattn.attention.base import InnerAttention, checked_inner
from linattn.attention.checks import check_queries
from linattn.attention.gates import SplitNeeds
from linattn.checks import check_sizes
from linattn.ops.nested import checked_parts
from linattn.types import KeyMask, Keys, Outputs, Queries, Values

_PerPart = tuple[Any, ...]


@final
class SplitHeads(InnerAttention):
    """Splits the heads: in `SplitHeads((4, local), (4, linear))` the first four query heads are local, the rest linear.

    Each of `parts` pairs a number of query heads with their attention; all are causal or none. Key heads, if there are
    fewer, are split in the same proportion. The state is a tuple with the state of each part. The gates, if any part
    needs some, are a tuple too, with None for each part that needs none."""

    def __init__(self, *parts: tuple[int, InnerAttention]):
        super().__init__()
        if not parts or not all(isinstance(part, (tuple, list)) and len(part) == 2 for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts) or "none"
            raise ValueError(f"parts must be pairs of a number of heads and an attention, but are {kinds}")
        check_sizes(heads=tuple(count for count, _ in parts))
        if len({checked_inner(part).causal for _, part in parts}) > 1:
            kinds = ", ".join(f"{type(part).__name__}(causal={part.causal})" for _, part in parts)
            raise ValueError(f"either all parts are causal or none, but they are {kinds}")
        self.heads = tuple(count for count, _ in parts)
        self.parts = nn.ModuleList(part for _, part in parts)
        self.causal = parts[0][1].causal
        self.scales_products = all(part.scales_products for _, part in parts)
        self.same_tokens = any(part.same_tokens for _, part in parts)
        needs = tuple(part.needs for _, part in parts)
        self.needs = SplitNeeds(self.heads, needs) if any(needs) else None

    def _attend(self, q: Queries, k: Keys, v: Values, key_mask: KeyMask) -> Outputs:
        pieces = zip(self.parts, self._split_queries(q), *self.split_keys(k, v, key_mask), strict=True)
        return torch.cat([part(*piece, key_mask=mask) for part, *piece, mask in pieces], 1)

    def _extend(
        self, q: Queries, k: Keys, v: Values, state: _PerPart | None, key_mask: KeyMask, gates: _PerPart | None = None
    ) -> tuple[Outputs, _PerPart]:
        states = checked_parts(state, len(self.parts))
        gates = gates or (None,) * len(self.heads)
        pieces = zip(self.parts, gates, states, self._split_queries(q), *self.split_keys(k, v, key_mask), strict=True)
        results = [part.extend(*piece, past, key_mask=mask, gates=own) for part, own, past, *piece, mask in pieces]
        ys, states = zip(*results, strict=True)
        return torch.cat(ys, 1), states

    def _summarize(self, k: Keys, v: Values, key_mask: KeyMask) -> _PerPart:
        """Return a tuple with the summary of each part."""
        pieces = zip(self.parts, *self.split_keys(k, v, key_mask), strict=True)
        return tuple(cast(InnerAttention, part).summarize(*piece, key_mask=mask) for part, *piece, mask in pieces)

    def read(self, q: Queries, summary: _PerPart) -> Outputs:
        check_queries(q)
        pieces = zip(self.parts, self._split_queries(q), checked_parts(summary, len(self.parts)), strict=True)
        return torch.cat([cast(InnerAttention, part).read(piece, own) for part, piece, own in pieces], 1)

    def as_causal(self) -> "SplitHeads | None":
        parts = [cast(InnerAttention, part).as_causal() for part in self.parts]
        known = [(count, part) for count, part in zip(self.heads, parts, strict=True) if part is not None]
        return SplitHeads(*known) if len(known) == len(parts) else None

    def _checked_state(self, state: Any) -> _PerPart:
        return checked_parts(state, len(self.parts))

    def _split_queries(self, q: Tensor) -> tuple[Tensor, ...]:
        if q.shape[1] != sum(self.heads):
            raise ValueError(f"made for {self.heads}, together {sum(self.heads)} heads, but there are {q.shape[1]}")
        return q.split(self.heads, 1)

    def split_keys(self, k: Tensor, v: Tensor, key_mask: KeyMask) -> tuple[Any, ...]:
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
