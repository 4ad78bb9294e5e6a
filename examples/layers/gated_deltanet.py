"""A layer of gated DeltaNet in one file. Yang et al., Gated Delta Networks, https://arxiv.org/abs/2412.06464

The state S of a head is a matrix that predicts the value of a key, Sᵀ k ≈ v. Each token lets it fade by α, corrects
the share β of the error that S makes at its own key, and then reads it with its query:

    S_t = α_t S_{t−1} + β_t k_t (v_t − (α_t S_{t−1})ᵀ k_t)ᵀ        y_t = S_tᵀ q_t / √d"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import HeadNorm, ShortConvolution, causal_delta_attention


class GatedDeltaNet(nn.Module):
    """Map (b, n, dim) to (b, n, dim). Each of the heads has `key_dim` channels for q and k, and `head_dim` for v."""

    def __init__(self, dim: int, num_heads: int, *, key_dim: int, head_dim: int):
        super().__init__()
        self.num_heads, keys, values = num_heads, num_heads * key_dim, num_heads * head_dim
        self.q_proj, self.k_proj = nn.Linear(dim, keys, bias=False), nn.Linear(dim, keys, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, values, bias=False), nn.Linear(dim, values, bias=False)
        self.q_conv, self.k_conv = ShortConvolution(keys, 4), ShortConvolution(keys, 4)
        self.v_conv = ShortConvolution(values, 4)
        self.beta_proj, self.step_proj = nn.Linear(dim, num_heads, bias=False), nn.Linear(dim, num_heads, bias=False)
        # steps from 0.001 to 0.1 and rates from 1 to 16, so that heads first forget within one to a thousand tokens
        self.step_bias = nn.Parameter(torch.logspace(-3, -1, num_heads).expm1().log())
        self.log_rate = nn.Parameter(torch.linspace(1, 16, num_heads).log())
        self.norm = HeadNorm(head_dim)
        self.o_proj = nn.Linear(values, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # neighbours first: every query, key and value sees the three tokens before its own
        q = self.heads(F.silu(self.q_conv(self.q_proj(x))))
        k = self.heads(F.silu(self.k_conv(self.k_proj(x))))
        v = self.heads(F.silu(self.v_conv(self.v_proj(x))))
        # with keys of length 1, β = 1 corrects the whole error
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        beta = self.beta_proj(x).sigmoid().mT
        log_alpha = (-self.log_rate.exp() * F.softplus(self.step_proj(x) + self.step_bias)).mT
        y, _ = causal_delta_attention(q, k, v, beta, log_decay=log_alpha, scale=q.shape[-1] ** -0.5)
        # the outputs of a state may have any scale: the norm makes heads comparable, the gate weighs their channels
        y = self.norm(y).transpose(1, 2).flatten(2)
        return self.o_proj(F.silu(self.g_proj(x)) * y)

    def heads(self, x: Tensor) -> Tensor:
        """Split the channels: (b, n, h d) becomes (b, h, n, d)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
