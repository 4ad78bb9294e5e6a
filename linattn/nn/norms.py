"""A norm with one weight. Nguyen and Salazar, Transformers without Tears, https://arxiv.org/abs/1910.05895"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn


@final
class ScaleNorm(nn.Module):
    """g · x / ‖x‖ with one learned g for all channels, √dim at first; zeros stay zeros, and x may have any scale."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.g = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.g, self.dim**0.5)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # the square of a small number would be zero; a constant factor changes neither the norm nor its gradient
        largest = wide.detach().abs().amax(-1, keepdim=True)
        wide = wide / largest.masked_fill(largest == 0, 1)
        square = wide.square().sum(-1, keepdim=True)
        return (self.g * wide * square.masked_fill(square == 0, 1).rsqrt()).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}"
