"""A linear map per head, for the learned feature maps."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.initialization import assign, places


@final
class PerHeadLinear(nn.Module):
    """x ↦ x W_h + b_h for head h. It starts as `nn.Linear` does or, with `identity`, as W_h = 1 without a bias."""

    def __init__(self, num_heads: int, head_dim: int, num_features: int, *, identity: bool = False):
        super().__init__()
        self.identity = identity
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, num_features))
        self.bias = None if identity else nn.Parameter(torch.empty(num_heads, 1, num_features))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.bias is None:
            assign(self.weight, places(self.weight[0], 0) == places(self.weight[0], 1))
            return
        bound = 1 / math.sqrt(self.weight.shape[1])
        self.weight.uniform_(-bound, bound)
        self.bias.uniform_(-bound, bound)

    def forward(self, x: Float[Tensor, "*b h n d"]) -> Float[Tensor, "*b h n f"]:
        if x.ndim < 3 or (x.shape[-3], x.shape[-1]) != tuple(self.weight.shape[:2]):
            h, d, _ = self.weight.shape
            raise ValueError(f"x must be (..., {h}, n, {d}), the heads of this feature map, but is {tuple(x.shape)}")
        y = x @ self.weight.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        num_heads, head_dim, num_features = self.weight.shape
        return f"{num_heads}, {head_dim}, {num_features}, identity={self.identity}"
