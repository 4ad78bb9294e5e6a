"""A small segmentation network: convolutions down to a quarter of the size, blocks that mix what is there, and up."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from linattn import (
    ChannelLinearAttention,
    ImageLinearAttention,
    MultiheadAttention,
    PositionLinearAttention,
    named_attention,
)

DIM, HEADS, DEPTH = 48, 4, 2


class Norm(nn.Module):
    """Layer norm over the channels of each pixel."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class Residual(nn.Module):
    """x + branch(x)"""

    def __init__(self, branch: nn.Module):
        super().__init__()
        self.branch = branch

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return x + self.branch(x)


class PixelAttention(nn.Module):
    """Any attention of `named_attention`, with pixels for tokens."""

    def __init__(self, name: str):
        super().__init__()
        self.attention = MultiheadAttention(DIM, HEADS, named_attention(name, num_heads=HEADS, head_dim=DIM // HEADS))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return self.attention(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])


# what mixes the pixels in a block; no norm goes before it, which would divide out how bright a pixel is
MIXERS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "efficient": lambda: Residual(ImageLinearAttention(DIM, key_dim=DIM // HEADS, value_dim=DIM // HEADS, heads=HEADS)),
    "taylor": lambda: Residual(PixelAttention("taylor")),
    "softmax": lambda: Residual(PixelAttention("softmax")),
    "position and channel": lambda: nn.Sequential(PositionLinearAttention(DIM), ChannelLinearAttention()),
}


class Segmenter(nn.Module):
    """Logits of each pixel. The finest features go past the blocks, as in a U-Net: the blocks tell where something is,
    they tell its shape."""

    def __init__(self, mixer: str):
        super().__init__()
        self.fine = nn.Conv2d(1, 16, 3, padding=1)
        self.down = nn.Sequential(
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(32, DIM, 3, stride=2, padding=1)
        )
        blocks: list[nn.Module] = []
        for _ in range(DEPTH):
            feed_forward = nn.Sequential(Norm(DIM), nn.Conv2d(DIM, 2 * DIM, 1), nn.GELU(), nn.Conv2d(2 * DIM, DIM, 1))
            blocks += [MIXERS[mixer](), Residual(feed_forward)]
        self.blocks = nn.Sequential(*blocks, Norm(DIM))
        self.up = nn.Sequential(nn.Conv2d(DIM, 16 * 16, 1), nn.PixelShuffle(4))
        self.last = nn.Conv2d(32, 16, 3, padding=1)
        self.logits = nn.Conv2d(16, 1, 1)

    def forward(self, images: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b h w"]:
        # about what a pixel's mean and deviation are, over all images
        fine = F.gelu(self.fine((images - 0.1) / 0.2))
        coarse = self.up(self.blocks(self.down(fine)))
        return self.logits(F.gelu(self.last(torch.cat([fine, coarse], 1)))).squeeze(1)
