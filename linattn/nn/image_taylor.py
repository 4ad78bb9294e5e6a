"""Position and channel attention for images, with first-order Taylor features: each pixel, or each channel, looks at
all others. Li et al., Linear Attention Mechanism, https://arxiv.org/abs/2007.14902"""

from typing import final

import torch
from torch import nn

from linattn.attention.linear import LinearAttention
from linattn.feature_maps.taylor import TaylorFeatureMap
from linattn.nn.image import Image, PixelMask, zero_missing


@final
class PositionLinearAttention(nn.Module):
    """x + γ y with y_i = Σ_j (1 + cos(q_i, k_j)) v_j / Σ_j (1 + cos(q_i, k_j)) over the pixels j; γ starts at zero.

    q and k have `key_channels` (an eighth of `channels`, at least one). Images need not be square, and a pixel of zeros
    causes no division by zero. Masked pixels (False) come back unchanged."""

    def __init__(self, channels: int, key_channels: int | None = None):
        super().__init__()
        keys = max(1, channels // 8) if key_channels is None else key_channels
        self.query_conv = nn.Conv2d(channels, keys, 1)
        self.key_conv = nn.Conv2d(channels, keys, 1)
        self.value_conv = nn.Conv2d(channels, channels, 1)
        self.gamma = nn.Parameter(torch.zeros(1))
        self.inner = LinearAttention(TaylorFeatureMap())

    def forward(self, x: Image, *, mask: PixelMask = None) -> Image:
        pixels = zero_missing(x, mask)
        parts = [convolution(pixels) for convolution in (self.query_conv, self.key_conv, self.value_conv)]
        q, k, v = (part.flatten(2).mT.unsqueeze(1) for part in parts)
        y = self.inner(q, k, v, key_mask=None if mask is None else mask.flatten(1).unsqueeze(1))
        return x + self.gamma * zero_missing(y.squeeze(1).mT.view_as(x), mask)


@final
class ChannelLinearAttention(nn.Module):
    """x + γ y with y_c = Σ_e (1 + cos(x_c, x_e)) x_e / Σ_e (1 + cos(x_c, x_e)) over the channels e, each a vector of
    all pixels; γ starts at zero. Images may have any size; masked pixels (False) come back unchanged."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1))
        self.inner = LinearAttention(TaylorFeatureMap())

    def forward(self, x: Image, *, mask: PixelMask = None) -> Image:
        channels = zero_missing(x, mask).flatten(2).unsqueeze(1)
        y = self.inner(channels, channels, channels)
        return x + self.gamma * y.squeeze(1).view_as(x)
