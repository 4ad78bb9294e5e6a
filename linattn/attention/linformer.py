"""Softmax attention over keys and values that are first projected along the sequence, m → r.
Wang et al., Linformer, https://arxiv.org/abs/2006.04768"""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from linattn.attention.base import InnerAttention, KeysAndValues
from linattn.attention.checks import checked_heads
from linattn.checks import check_instances, check_sizes, check_types, given
from linattn.ops.nested import checked_kind
from linattn.ops.numerics import accumulator
from linattn.ops.softmax.kernel import softmax_attention
from linattn.ops.tokens.compaction import compact, pack
from linattn.types import KeyMask, Keys, Outputs, Queries, Values

_Projected = Float[Tensor, "b hk r d"]
_Present = Bool[Tensor, " b #hk r"] | None


class SequenceProjection(nn.Module, ABC):
    """Projects up to `max_length` keys or values to at most `projected_length`, which must not exceed `max_length`."""

    @check_types
    def __init__(self, max_length: int, projected_length: int):
        super().__init__()
        check_sizes(max_length=max_length, projected_length=projected_length)
        if projected_length > max_length:
            raise ValueError(
                f"projected_length must be at most max_length, but they are {projected_length} and {max_length}"
            )
        self.max_length, self.projected_length = max_length, projected_length

    @abstractmethod
    def forward(self, x: Keys, *, key_mask: KeyMask = None) -> tuple[_Projected, _Present]:
        """Return the projected tokens and a mask of those that exist (None: all). A masked token is a missing token."""

    @property
    def window(self) -> int:
        """Return the number of consecutive tokens per projected token, for pooling."""
        return -(-self.max_length // self.projected_length)

    def extra_repr(self) -> str:
        return f"{self.max_length} → {self.projected_length}"


@final
class LearnedProjection(SequenceProjection):
    """x̄_i = Σ_j E_ij x_j with a learned matrix E of `projected_length` rows and `max_length` columns, one for all
    heads, or one per head if `num_key_heads` is given.

    Column j multiplies the j-th *present* token, so padding changes nothing; a shorter sequence leaves columns unused.
    E starts as the paper's Johnson–Lindenstrauss matrix, E_ij ~ N(0, 1/`projected_length`)."""

    @check_types
    def __init__(self, max_length: int, projected_length: int, *, num_key_heads: int | None = None):
        super().__init__(max_length, projected_length)
        check_sizes(**given(num_key_heads=num_key_heads))
        heads = () if num_key_heads is None else (num_key_heads,)
        self.weight = nn.Parameter(torch.empty(*heads, projected_length, max_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.projected_length**-0.5)

    def forward(self, x: Keys, *, key_mask: KeyMask = None) -> tuple[_Projected, None]:
        if self.weight.ndim == 3 and len(self.weight) != x.shape[1]:
            raise ValueError(f"made for {len(self.weight)} key heads, but there are {x.shape[1]}")
        x = x if key_mask is None else pack(x, compact(key_mask))
        return self.weight[..., : x.shape[-2]].to(x.dtype) @ x, None


@final
class MeanPooling(SequenceProjection):
    """Takes the mean of each window of ⌈max_length / projected_length⌉ present tokens, of which the last may be
    shorter, so that `max_length` tokens become at most `projected_length`. It has no weights."""

    def forward(self, x: Keys, *, key_mask: KeyMask = None) -> tuple[_Projected, _Present]:
        return pool_sequence(x, self.window, key_mask=key_mask)


@final
class StridedConvolution(SequenceProjection):
    """Convolves along the sequence with a stride equal to the width, ⌈max_length / projected_length⌉ present tokens, so
    that `max_length` tokens become at most `projected_length`. Each of `head_dim` channels has its own weights, the
    same for all heads, which start as mean pooling."""

    @check_types
    def __init__(self, max_length: int, projected_length: int, head_dim: int):
        super().__init__(max_length, projected_length)
        check_sizes(head_dim=head_dim)
        self.weight = nn.Parameter(torch.empty(self.window, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / self.window)

    def forward(self, x: Keys, *, key_mask: KeyMask = None) -> tuple[_Projected, _Present]:
        if x.shape[-1] != self.weight.shape[-1]:
            raise ValueError(f"made for {self.weight.shape[-1]} channels per head, but there are {x.shape[-1]}")
        return pool_sequence(x, self.window, weight=self.weight, key_mask=key_mask)


def pool_sequence(
    x: Keys, size: int, *, weight: Float[Tensor, "size d"] | None = None, key_mask: KeyMask = None
) -> tuple[_Projected, _Present]:
    """Return the mean of each window of `size` present tokens or, with a `weight` per place in a window and channel,
    the weighted sum; and a mask of the windows that are not empty (None: all). The last window may be shorter."""
    count = torch.full(x.shape[:1], x.shape[-2], device=x.device).view(-1, 1)
    if key_mask is not None:
        where = compact(key_mask.expand(x.shape[0], -1, -1))
        x, count = pack(x, where), where.total
    r = (x.shape[-2] + size - 1) // size
    windows = F.pad(x, (0, 0, 0, r * size - x.shape[-2])).unflatten(-2, (r, size))
    lengths = (count.unsqueeze(-1) - size * torch.arange(r, device=x.device)).clamp(0, size)
    pooled = (windows if weight is None else windows * weight).sum(-2, dtype=accumulator(x.dtype))
    if weight is None:
        pooled = pooled / lengths.clamp(min=1).unsqueeze(-1)
    return pooled.to(x.dtype), None if key_mask is None else lengths > 0


@final
class LinformerAttention(InnerAttention):
    """y_i = Σ_r softmax_r(q_i·k̄_r / √d) v̄_r with k̄ and v̄ the keys and values after `key_projection` and
    `value_projection` (None: the same). Raises ValueError for more keys than the `max_length` of either.

    To share weights as the paper does, pass the same object: one projection for keys and values (the default), or for
    all layers. Every output depends on every key, so there is no causal form."""

    causal = False
    scales_products = True

    def __init__(self, key_projection: SequenceProjection, value_projection: SequenceProjection | None = None):
        super().__init__()
        self.key_projection = key_projection
        self.value_projection = key_projection if value_projection is None else value_projection
        check_instances(SequenceProjection, key_projection=key_projection, value_projection=self.value_projection)

    def _summarize(self, k: Keys, v: Values, key_mask: KeyMask) -> KeysAndValues:
        """Return the r projected keys and values."""
        m, longest = k.shape[-2], min(self.key_projection.max_length, self.value_projection.max_length)
        if m > longest:
            raise ValueError(f"made for at most {longest} keys, but there are {m}")
        k, present = self.key_projection(k, key_mask=key_mask)
        v, present_values = self.value_projection(v, key_mask=key_mask)
        if k.shape[-2] != v.shape[-2]:
            raise ValueError(f"keys are projected to {k.shape[-2]} and values to {v.shape[-2]}: the two must agree")
        return KeysAndValues(k, v, present_values if present is None else present)

    def read(self, q: Queries, summary: KeysAndValues) -> Outputs:
        summary = checked_kind(summary, KeysAndValues)
        q, k, v, _ = checked_heads(q, summary.k, summary.v, summary.key_mask)
        return softmax_attention(q, k, v, key_mask=summary.key_mask)
