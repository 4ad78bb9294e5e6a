"""The options and layers that linear-attention-transformer, performer-pytorch and linformer have in common."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import nn

from linattn.attention import InnerAttention, LinearAttention, SplitHeads
from linattn.compat.options import REQUIRED, Options
from linattn.feature_maps import EfficientFeatureMap
from linattn.nn import (
    Branch,
    Chunked,
    FeedForward,
    GatedFeedForward,
    MultiheadAttention,
    ResidualSequence,
    ReversibleSequence,
    TokenShift,
)

Pair = tuple[Branch, Branch]


@dataclass(frozen=True, kw_only=True)
class LayerOptions(Options):
    """The options that the packages share, under the packages' names: a feed-forward has `ff_mult` · dim hidden units,
    gated if `ff_glu`, and runs on `ff_chunks` pieces of the sequence, one after the other."""

    dim: int = REQUIRED
    depth: int = REQUIRED
    heads: int = 8
    dim_head: int | None = None
    causal: bool = False
    reversible: bool = False
    shift_tokens: bool = False
    ff_mult: int = 4
    ff_chunks: int = 1
    ff_glu: bool = False
    ff_dropout: float = 0.0
    num_tokens: int = REQUIRED
    max_seq_len: int = REQUIRED

    @property
    def channels(self) -> int:
        """The channels per head. A `dim_head` of None stands for dim / heads."""
        if self.dim_head is None and self.dim % self.heads:
            raise ValueError(f"heads must divide dim, or dim_head be given, but they are {self.heads} and {self.dim}")
        return self.dim // self.heads if self.dim_head is None else self.dim_head


def make_pair(
    options: LayerOptions,
    attention: nn.Module,
    norm: Callable[[int], nn.Module] | None = nn.LayerNorm,
    *,
    shift: tuple[int, ...] | None = None,
    rezero: bool = False,
) -> Pair:
    """Return `attention` and a new feed-forward as two `Branch`es with the given `rezero`. Each has a norm of its own,
    which `norm` makes for a number of channels (None: no norm), and a `TokenShift(shift)` (None: no shift)."""
    sizes = options.dim, options.ff_mult * options.dim
    if options.ff_glu:
        part = GatedFeedForward(*sizes, activation=F.gelu, bias=True, hidden_dropout=options.ff_dropout)
    else:
        part = FeedForward(*sizes, hidden_dropout=options.ff_dropout)
    feed_forward = part if options.ff_chunks == 1 else Chunked(part, options.ff_chunks)

    def branch(module: nn.Module) -> Branch:
        return Branch(
            module, norm=norm and norm(options.dim), shift=TokenShift(shift) if shift else None, rezero=rezero
        )

    return branch(attention), branch(feed_forward)


def make_stack(options: LayerOptions, pairs: Iterable[Pair], reduce: str) -> ResidualSequence | ReversibleSequence:
    if options.reversible:
        return ReversibleSequence(pairs, reduce=reduce)
    return ResidualSequence(branch for pair in pairs for branch in pair)


def efficient_attention(causal: bool) -> LinearAttention:
    """Return the packages' linear attention. The causal one normalises the output, the other one each key feature."""
    return LinearAttention(EfficientFeatureMap(), causal=causal, normalize="output" if causal else "keys")


def split_heads(*parts: tuple[int, InnerAttention]) -> InnerAttention:
    """Return the parts, each with its number of heads, as one attention. Parts without heads are left out."""
    parts = tuple(part for part in parts if part[0])
    return parts[0][1] if len(parts) == 1 else SplitHeads(*parts)


def inner_parts(module: MultiheadAttention) -> list[tuple[int, InnerAttention]]:
    """Return the inner attentions of a module, each with its number of heads; there are several in a `SplitHeads`."""
    if isinstance(inner := module.inner, SplitHeads):
        return list(zip(inner.heads, cast(Iterable[InnerAttention], inner.parts), strict=True))
    return [(module.q_proj.out_features // module.head_dim, inner)]
