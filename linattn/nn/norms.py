"""Norms without an epsilon: the input may have any scale, and zeros stay zeros."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn


@final
class HeadNorm(nn.Module):
    """y = w ⊙ x / √mean(x²) over the `head_dim` channels of a head, which un-normalised attention needs.
    Sun et al., Retentive Network, https://arxiv.org/abs/2307.08621; Qin et al., TransNormer,
    https://arxiv.org/abs/2210.10340

    The sums of un-normalised attention are products of three small numbers when training starts: the customary epsilon
    would leave them small."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return _rms_normalized(x, self.weight)


@final
class ScaleNorm(nn.Module):
    """y = g · x / ‖x‖ over `dim` channels with one learned g, √dim at first.
    Nguyen and Salazar, https://arxiv.org/abs/1910.05895"""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.g = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.g, self.dim**0.5)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return _rms_normalized(x, self.g / self.dim**0.5)

    def extra_repr(self) -> str:
        return f"{self.dim}"


def _rms_normalized(x: Float[Tensor, "*b d"], factor: Tensor) -> Float[Tensor, "*b d"]:
    """Return x / √mean(x²) times the factor, computed in float32 or better."""
    dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
    # the square of a small number would be zero; a constant factor changes neither the norm nor its gradient
    largest = x.detach().abs().amax(-1, keepdim=True)
    x = x / largest.masked_fill(largest == 0, 1)
    square = x.square().mean(-1, keepdim=True)
    return (x * square.masked_fill(square == 0, 1).rsqrt() * factor).to(dtype)
