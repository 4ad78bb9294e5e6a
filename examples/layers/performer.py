"""A layer of a causal Performer in one file. Choromanski et al., https://arxiv.org/abs/2009.14794

Softmax attention weighs a value by exp(q·k/√d). With random directions ω from N(0, I) and u = x / d^¼, the features

    φ(x) = exp(Ω u − ‖u‖²/2) / √f        have        φ(q)·φ(k) ≈ exp(q·k/√d)

so that sums over keys come first, and the cost grows linearly with the length:

    y_i = φ(q_i) Σ_{j≤i} φ(k_j) v_jᵀ / φ(q_i)·Σ_{j≤i} φ(k_j)

The exponentials of long keys overflow; linattn's own FAVOR+ avoids that by a scale per token."""

import torch
from torch import Tensor, nn

from linattn import RandomProjection, causal_linear_attention


class PerformerAttention(nn.Module):
    """Map (b, n, dim) to (b, n, dim) with `num_features` random features per head."""

    def __init__(self, dim: int, num_heads: int, *, num_features: int):
        super().__init__()
        self.num_heads, head_dim = num_heads, dim // num_heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        # x ↦ Ω x / d^¼, whose rows are at right angles: that estimates exp(q·k/√d) better than independent rows
        self.projection = RandomProjection(head_dim, num_features)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        y, _ = causal_linear_attention(self.features(q), self.features(k), v)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def features(self, x: Tensor) -> Tensor:
        """φ(x), which is positive: so are all weights of the attention."""
        half_square = x.square().sum(-1, keepdim=True) / (2 * x.shape[-1] ** 0.5)
        exponent = self.projection(x) - half_square
        return torch.exp(exponent) / exponent.shape[-1] ** 0.5

    def heads(self, x: Tensor) -> Tensor:
        """Split the channels: (b, n, h d) becomes (b, h, n, d)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
