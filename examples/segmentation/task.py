"""A segmentation task: images with masks, drawn for training, and fixed ones for the test."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Batch(NamedTuple):
    images: Float[Tensor, "b 1 h w"]
    masks: Bool[Tensor, "b h w"]


class Task(ABC):
    name: str
    steps: int
    batch_size: int
    test: Batch

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Batch:
        """Images to train with."""


def mean_iou(predicted: Bool[Tensor, "b h w"], masks: Bool[Tensor, "b h w"]) -> float:
    """The mean over images of |predicted ∩ mask| / |predicted ∪ mask|; one where both are empty."""
    both, either = (predicted & masks).sum((1, 2)), (predicted | masks).sum((1, 2))
    return torch.where(either == 0, 1.0, both / either.clamp(min=1)).mean().item()
