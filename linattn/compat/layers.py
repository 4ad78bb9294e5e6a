"""The parts that linear-attention-transformer, performer-pytorch and linformer have in common."""

from collections.abc import Callable, Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.attention import InnerAttention, SplitHeads
from linattn.nn import Branch, Chunked, FeedForward, GatedFeedForward, ResidualSequence, ReversibleSequence, TokenShift

Pair = tuple[Branch, Branch]


def make_pair(
    attention: nn.Module,
    feed_forward: nn.Module,
    norm: Callable[[], nn.Module] | None,
    shift: tuple[int, ...] | None = None,
    *,
    rezero: bool = False,
) -> Pair:
    """Return the two modules as branches, each with a norm and a token shift of its own."""

    def branch(module: nn.Module) -> Branch:
        return Branch(module, norm=norm and norm(), shift=TokenShift(shift) if shift else None, rezero=rezero)

    return branch(attention), branch(feed_forward)


def make_stack(pairs: Iterable[Pair], reversible: bool, reduce: str) -> ResidualSequence | ReversibleSequence:
    if reversible:
        return ReversibleSequence(pairs, reduce=reduce)
    return ResidualSequence(branch for pair in pairs for branch in pair)


def make_feed_forward(dim: int, mult: int = 4, *, glu: bool = False, dropout: float, chunks: int = 1) -> nn.Module:
    if glu:
        module = GatedFeedForward(dim, mult * dim, activation=F.gelu, bias=True, hidden_dropout=dropout)
    else:
        module = FeedForward(dim, mult * dim, hidden_dropout=dropout)
    return module if chunks == 1 else Chunked(module, chunks)


def head_channels(dim: int, heads: int, dim_head: int | None) -> int:
    """Return the channels per head. A `dim_head` of None stands for dim / heads."""
    if dim_head is None and dim % heads:
        raise ValueError(f"heads must divide dim, or dim_head be given, but they are {heads} and {dim}")
    return dim // heads if dim_head is None else dim_head


def split_heads(*parts: tuple[int, InnerAttention]) -> InnerAttention:
    """Return the parts, each with its number of heads, as one attention. Parts without heads are left out."""
    parts = tuple(part for part in parts if part[0])
    return parts[0][1] if len(parts) == 1 else SplitHeads(*parts)


def check_context(wanted: bool, option: str, context: Tensor | None, context_mask: Tensor | None) -> None:
    """Raise ValueError for a context that the stack does not attend to, and for a mask without a context."""
    if context is not None and not wanted:
        raise ValueError(f"a context was given, but nothing attends to it: {option} is False")
    if context is None and context_mask is not None:
        raise ValueError("context_mask is of a context, but none was given")
