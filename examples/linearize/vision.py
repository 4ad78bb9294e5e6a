"""A ViT that classifies MNIST's digits, 28 × 28 pixels in patches of 4 × 4, which no patch knows alone."""

from pathlib import Path

import numpy as np
import torch
from transformers import ViTConfig, ViTForImageClassification

from examples.linearize.task import Batch, Task, chunks
from examples.segmentation.glyphs import idx

BATCH, TEST = 64, 1_000


class Digits:
    """The images of a file such as t10k-images-idx3-ubyte.gz, with the labels of the file beside it whose name has
    labels-idx1 in the place of images-idx3. The last thousand are held out; the others are moved by up to 2 pixels."""

    def __init__(self, seed: int, path: Path) -> None:
        self.random = np.random.default_rng([seed, 7])
        self.images = idx(path, (28, 28)).float().unsqueeze(1) / 128 - 1
        self.labels = idx(path.with_name(path.name.replace("images-idx3", "labels-idx1")), ()).long()

    def batch(self) -> Batch:
        rows = torch.from_numpy(self.random.integers(len(self.images) - TEST, size=BATCH))
        down, right = self.random.integers(-2, 3, size=2).tolist()
        return {"pixel_values": self.images[rows].roll((down, right), (-2, -1)), "labels": self.labels[rows]}

    def held_out(self) -> list[Batch]:
        return chunks({"pixel_values": self.images[-TEST:], "labels": self.labels[-TEST:]})


def model() -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            image_size=28,
            patch_size=4,
            num_channels=1,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=2,
            initializer_range=0.1,
            num_labels=10,  # pyright: ignore[reportCallIssue]
        )
    )


TASK = Task(name="vision", steps=500, lr=2e-3, window=2, metric="accuracy", model=model, data=Digits)  # pyright: ignore[reportArgumentType]
