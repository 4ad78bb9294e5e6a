"""The parts that linear-attention-transformer, performer-pytorch and linformer have in common."""

from collections.abc import Iterable

import torch.nn.functional as F
from torch import nn

from linattn.nn import Branch, Chunked, FeedForward, GatedFeedForward, ResidualSequence, ReversibleSequence


def make_stack(
    pairs: Iterable[tuple[Branch, Branch]], reversible: bool, reduce: str
) -> ResidualSequence | ReversibleSequence:
    if reversible:
        return ReversibleSequence(pairs, reduce=reduce)
    return ResidualSequence(branch for pair in pairs for branch in pair)


def make_feed_forward(dim: int, mult: int = 4, *, glu: bool = False, dropout: float, chunks: int = 1) -> nn.Module:
    if glu:
        module = GatedFeedForward(dim, mult * dim, activation=F.gelu, bias=True, hidden_dropout=dropout)
    else:
        module = FeedForward(dim, mult * dim, hidden_dropout=dropout)
    return module if chunks == 1 else Chunked(module, chunks)
