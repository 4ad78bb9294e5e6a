"""The part of a block that acts on each token alone."""

from typing import final

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


@final
class FeedForward(nn.Module):
    """W₂ gelu(W₁ x + b₁) + b₂, as in GPT-2."""

    def __init__(self, dim: int, hidden_dim: int, *, dropout: float = 0.0):
        super().__init__()
        self.up_proj = nn.Linear(dim, hidden_dim)
        self.down_proj = nn.Linear(hidden_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        return self.dropout(self.down_proj(F.gelu(self.up_proj(x))))


@final
class GatedFeedForward(nn.Module):
    """W₃ (silu(W₁ x) ⊙ W₂ x), called SwiGLU. Shazeer, https://arxiv.org/abs/2002.05202"""

    def __init__(self, dim: int, hidden_dim: int, *, dropout: float = 0.0):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        return self.dropout(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))
