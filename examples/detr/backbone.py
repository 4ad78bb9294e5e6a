"""The tokens of the Transformer: features by convolutions, and their positions."""

import itertools
import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn


class Backbone(nn.Module):
    """Convolutions of stride 2. What is not an image is zeros before each of them, as is what lies beyond an image, so
    that an image in a batch has the features that it has alone."""

    def __init__(self, channels: int, width: int, depth: int = 3):
        super().__init__()
        widths = [channels, *(width // 2 ** (depth - 1 - layer) for layer in range(depth))]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1) for before, after in itertools.pairwise(widths)
        )

    def forward(
        self, x: Float[Tensor, "b c h w"], mask: Bool[Tensor, "b h w"]
    ) -> tuple[Float[Tensor, "b d h2 w2"], Bool[Tensor, "b h2 w2"]]:
        for convolution in self.convolutions:
            x, mask = F.relu(convolution(x * mask.unsqueeze(1))), mask[:, ::2, ::2]
        return x, mask


def positions(mask: Bool[Tensor, "b h w"], dim: int) -> Float[Tensor, "b n d"]:
    """Sines and cosines of each token's height and width, as shares of its own image."""
    parts = []
    for side in (1, 2):
        count = mask.cumsum(side).double()
        share = 2 * math.pi * count / count.amax((1, 2), keepdim=True)
        frequency = 10_000 ** (torch.arange(0, dim // 2, 2, device=mask.device) / (dim // 2))
        angle = share.unsqueeze(-1) / frequency
        parts += [angle.sin(), angle.cos()]
    return torch.cat(parts, -1).flatten(1, 2)
