"""The norm of each head's output, which un-normalised attention needs.
Sun et al., Retentive Network, https://arxiv.org/abs/2307.08621; Qin et al., TransNormer, https://arxiv.org/abs/2210.10340"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn


@final
class HeadNorm(nn.Module):
    """w ⊙ y / √mean(y²) over the channels of a head: RMSNorm without an epsilon, so of any scale; zeros stay zeros.

    The sums of un-normalised attention are products of three small numbers when training starts: with the customary
    epsilon the norm would leave them small."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, y: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        x = y.to(torch.promote_types(y.dtype, torch.float32))
        # the square of a small number would be zero; a constant factor changes neither the norm nor its gradient
        largest = x.detach().abs().amax(-1, keepdim=True)
        x = x / largest.masked_fill(largest == 0, 1)
        square = x.square().mean(-1, keepdim=True)
        return (x * square.masked_fill(square == 0, 1).rsqrt() * self.weight).to(y.dtype)
