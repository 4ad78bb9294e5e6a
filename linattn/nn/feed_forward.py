"""Feed-forward layers, the part of a block that acts on each token alone."""

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linattn.checks import check_instances, check_sizes, check_types
from linattn.nn.checks import check_channels, check_floats

Activation = Callable[[Tensor], Tensor]


@final
class FeedForward(nn.Module):
    """y = W₂ a(W₁ x + b₁) + b₂ with a = gelu, as in GPT-2, or any other `activation`.

    x and y have `dim` channels, with `hidden_dim` hidden units between. Without `bias` there are no b₁ and b₂.
    `dropout` is the probability of dropping outputs in training, `hidden_dropout` that of hidden units."""

    @check_types
    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = F.gelu,
        bias: bool = True,
        dropout: float = 0.0,
        hidden_dropout: float = 0.0,
    ):
        super().__init__()
        check_sizes(dim=dim, hidden_dim=hidden_dim)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=bias)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=bias)
        self.activation = activation
        self.dropout, self.hidden_dropout = nn.Dropout(dropout), nn.Dropout(hidden_dropout)

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        check_channels(x, self.up_proj)
        hidden = self.hidden_dropout(self.activation(self.up_proj(x)))
        return self.dropout(self.down_proj(hidden))


@final
class GatedFeedForward(nn.Module):
    """y = W₃ (a(W₁ x) ⊙ W₂ x), the GLU variants: the `activation` a = silu makes SwiGLU, gelu GEGLU, relu ReGLU,
    sigmoid GLU itself. Shazeer, https://arxiv.org/abs/2002.05202

    x and y have `dim` channels, a(W₁ x) and W₂ x `hidden_dim`; `bias` adds a vector to each of the three products.
    See `FeedForward` for `dropout` and `hidden_dropout`."""

    @check_types
    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = F.silu,
        bias: bool = False,
        dropout: float = 0.0,
        hidden_dropout: float = 0.0,
    ):
        super().__init__()
        check_sizes(dim=dim, hidden_dim=hidden_dim)
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=bias)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=bias)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=bias)
        self.activation = activation
        self.dropout, self.hidden_dropout = nn.Dropout(dropout), nn.Dropout(hidden_dropout)

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        check_channels(x, self.up_proj)
        hidden = self.hidden_dropout(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return self.dropout(self.down_proj(hidden))


@final
class Chunked(nn.Module):
    """Apply a `module` that acts on each token alone to `chunks` pieces of the sequence, one after the other.

    The result is the same, but only one piece's hidden units are in memory at a time, also in the backward pass, which
    recomputes them. Kitaev et al., Reformer, https://arxiv.org/abs/2001.04451, section 3."""

    def __init__(self, module: nn.Module, chunks: int):
        super().__init__()
        check_instances(nn.Module, module=module)
        check_sizes(chunks=chunks)
        self.module, self.chunks = module, chunks

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        check_floats(x)
        if self.chunks == 1:
            return self.module(x)
        pieces = x.chunk(self.chunks, -2)
        if not torch.is_grad_enabled():
            return torch.cat([self.module(piece) for piece in pieces], -2)
        return torch.cat([checkpoint(self.module, piece, use_reentrant=False) for piece in pieces], -2)

    def extra_repr(self) -> str:
        return f"chunks={self.chunks}"
