"""A layer of gated linear attention in one file. Yang et al., https://arxiv.org/abs/2312.06635

Each channel of the keys has a decay of its own, computed from the token, so that a head can keep a part of its state
and forget the rest:

    S_t = diag(α_t) S_{t−1} + k_t v_tᵀ        y_t = S_tᵀ q_t / √d"""

import torch.nn.functional as F
from torch import Tensor, nn

from linattn import HeadNorm, causal_linear_attention


class GatedLinearAttention(nn.Module):
    """Map (b, n, dim) to (b, n, dim). Each of the heads has `key_dim` channels for q and k, and `head_dim` for v."""

    def __init__(self, dim: int, num_heads: int, *, key_dim: int, head_dim: int):
        super().__init__()
        self.num_heads, keys, values = num_heads, num_heads * key_dim, num_heads * head_dim
        self.q_proj, self.k_proj = nn.Linear(dim, keys, bias=False), nn.Linear(dim, keys, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, values, bias=False), nn.Linear(dim, values, bias=False)
        # a product of two small matrices: a full one for the decays would be as large as that of the keys
        self.decay_in, self.decay_out = nn.Linear(dim, 16, bias=False), nn.Linear(16, keys)
        self.norm = HeadNorm(head_dim)
        self.o_proj = nn.Linear(values, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        # α = σ(…)^(1/16): the root keeps decays near 1, so that states last long from the start
        log_alpha = self.heads(F.logsigmoid(self.decay_out(self.decay_in(x))) / 16)
        q = q * q.shape[-1] ** -0.5
        # a plain sum, not divided by the sum of its weights: the norm after it sets the scale
        y, _ = causal_linear_attention(q, k, v, log_decay=log_alpha, normalize=None)
        y = self.norm(y).transpose(1, 2).flatten(2)
        return self.o_proj(F.silu(self.g_proj(x)) * y)

    def heads(self, x: Tensor) -> Tensor:
        """Split the channels: (b, n, h d) becomes (b, h, n, d)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
