"""Images of different sizes in one batch: each in the upper left corner of a canvas, and a mask of where it is."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def collate(images: Sequence[Float[Tensor, "c h w"]]) -> tuple[Float[Tensor, "b c h2 w2"], Bool[Tensor, "b h2 w2"]]:
    """The canvas is as high as the highest image and as wide as the widest; the mask is True where an image is."""
    height, width = (max(image.shape[side] for image in images) for side in (1, 2))
    batch = images[0].new_zeros(len(images), images[0].shape[0], height, width)
    mask = torch.zeros(len(images), height, width, dtype=torch.bool)
    for row, image in enumerate(images):
        _, h, w = image.shape
        batch[row, :, :h, :w], mask[row, :h, :w] = image, True
    return batch, mask
