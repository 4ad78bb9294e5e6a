"""Cell nuclei under microscopes, 96 × 96 pixels, real images with masks. A local task: they are seen where they are."""

from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from examples.segmentation.task import Batch, Task


@final
class Nuclei(Task):
    name, steps, batch_size = "nuclei", 600, 12

    def __init__(self, path: Path):
        """Read an .npz with `images`, uint8 (count, h, w), and `masks`, bits packed along the last axis. A fifth of it
        is for the test."""
        with np.load(path) as file:
            images = torch.from_numpy(file["images"].astype(np.float32) / 255).unsqueeze(1)
            masks = torch.from_numpy(np.unpackbits(file["masks"], axis=-1).astype(bool))[..., : images.shape[-1]]
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        test, train = order[: len(order) // 5], order[len(order) // 5 :]
        self.test, self.train = Batch(images[test], masks[test]), Batch(images[train], masks[train])

    def draw(self, generator: torch.Generator) -> Batch:
        """With some of them turned and mirrored."""
        rows = torch.randint(len(self.train.images), (self.batch_size,), generator=generator)
        images, masks = self.train.images[rows], self.train.masks[rows]
        for dim in (-1, -2):
            if torch.rand((), generator=generator) < 0.5:
                images, masks = images.flip(dim), masks.flip(dim)
        return Batch(images, masks)


def otsu(images: Tensor) -> Tensor:
    """Brighter than the threshold that parts an image's pixels into two groups of least variance; nothing is learned.
    The group with fewer pixels are the nuclei. Otsu, https://doi.org/10.1109/TSMC.1979.4310076"""
    levels = torch.linspace(0, 1, 64)
    best = torch.full((len(images),), -1.0)
    predicted = torch.zeros(images.shape[0], *images.shape[2:], dtype=torch.bool)
    for level in levels:
        above = images[:, 0] > level
        share = above.float().mean((1, 2))
        means = [(images[:, 0] * part).sum((1, 2)) / part.sum((1, 2)).clamp(min=1) for part in (above, ~above)]
        between = share * (1 - share) * (means[0] - means[1]).square()
        better = between > best
        best = torch.where(better, between, best)
        predicted = torch.where(better[:, None, None], above, predicted)
    many = predicted.float().mean((1, 2), keepdim=True) > 0.5
    return predicted ^ many
