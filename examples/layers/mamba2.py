"""A layer of Mamba-2 in one file, in the words of attention. Dao and Gu, https://arxiv.org/abs/2405.21060

The paper's state space model is linear attention with a state that fades: its C is our q, its B is k, and its x is v.
Each head computes a step Δ from the token. A long step forgets much and writes strongly; a step of 0 skips the token:

    S_t = exp(−A Δ_t) S_{t−1} + Δ_t k_t v_tᵀ        y_t = S_tᵀ q_t + D v_t

The paper's heads share one q and one k; here each head has its own, as in other attentions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import HeadNorm, ShortConvolution, causal_linear_attention


class Mamba2(nn.Module):
    """Map (b, n, dim) to (b, n, dim). Each of the heads has `state_dim` channels for q and k, and `head_dim` for v."""

    def __init__(self, dim: int, num_heads: int, *, state_dim: int, head_dim: int):
        super().__init__()
        self.num_heads, keys, values = num_heads, num_heads * state_dim, num_heads * head_dim
        self.q_proj, self.k_proj = nn.Linear(dim, keys, bias=False), nn.Linear(dim, keys, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, values, bias=False), nn.Linear(dim, values, bias=False)
        self.q_conv, self.k_conv = ShortConvolution(keys, 4), ShortConvolution(keys, 4)
        self.v_conv = ShortConvolution(values, 4)
        self.step_proj = nn.Linear(dim, num_heads, bias=False)
        # steps from 0.001 to 0.1 and rates A from 1 to 16, so that heads first forget within one to a thousand tokens
        self.step_bias = nn.Parameter(torch.logspace(-3, -1, num_heads).expm1().log())
        self.log_rate = nn.Parameter(torch.linspace(1, 16, num_heads).log())
        self.skip = nn.Parameter(torch.ones(num_heads))
        self.norm = HeadNorm(values)
        self.o_proj = nn.Linear(values, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.heads(F.silu(self.q_conv(self.q_proj(x))))
        k = self.heads(F.silu(self.k_conv(self.k_proj(x))))
        v = self.heads(F.silu(self.v_conv(self.v_proj(x))))
        step = F.softplus(self.step_proj(x) + self.step_bias).mT
        log_decay = -self.log_rate.exp().unsqueeze(-1) * step
        # a state space model is a plain sum: it is not divided by the sum of its weights
        y, _ = causal_linear_attention(q, k, step.unsqueeze(-1) * v, log_decay=log_decay, normalize=None)
        y = y + self.skip.view(-1, 1, 1) * v
        # the gate comes before the norm, which is of all heads together
        y = self.norm(F.silu(self.g_proj(x)) * y.transpose(1, 2).flatten(2))
        return self.o_proj(y)

    def heads(self, x: Tensor) -> Tensor:
        """Split the channels: (b, n, h d) becomes (b, h, n, d)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
