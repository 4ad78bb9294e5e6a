"""A task of the runner: a stock model of transformers, data in its own format, and the length of its training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from linattn.linearize.predictions import predicts_next
from linattn.models.loss import NO_LABEL

# sequences that are evaluated at once
CHUNK = 32

Batch = dict[str, Tensor]


class Data(Protocol):
    """Batches to train on, which include `labels`, and held-out ones."""

    def batch(self) -> Batch: ...

    def held_out(self) -> list[Batch]: ...


class NewRows:
    """Rows that `generate` draws: `size` new ones in every batch, and `test` others that are held out."""

    def __init__(self, generate: Callable[[np.random.Generator, int], Batch], size: int, test: int, seed: int) -> None:
        self.generate, self.size, self.random = generate, size, np.random.default_rng([seed, 5])
        self.test = generate(np.random.default_rng([seed, 6]), test)

    def batch(self) -> Batch:
        return self.generate(self.random, self.size)

    def held_out(self) -> list[Batch]:
        return chunks(self.test)


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    steps: int
    """Updates of the teacher's weights; conversions get a share of them."""
    lr: float
    weight_decay: float = 0.1
    window: int
    """Tokens that local heads see, too few to solve the whole task."""
    metric: str
    """The figure of `measure` that the tables show."""
    model: Callable[[], PreTrainedModel]
    data: Callable[[int], Data]
    """The data of a seed."""


def chunks(batch: Batch) -> list[Batch]:
    """Split a large batch into several to evaluate one after the other."""
    pieces = {name: tensor.split(CHUNK) for name, tensor in batch.items()}
    return [dict(zip(pieces, piece, strict=True)) for piece in zip(*pieces.values(), strict=True)]


@torch.no_grad()
def measure(model: PreTrainedModel, batches: list[Batch]) -> dict[str, float]:
    """Return loss, bits and accuracy over all labels. A language model's logits predict the next token's label."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for batch in batches:
        logits, labels = predictions(model, batch)
        loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(-1) == labels).sum())
        count += len(labels)
    model.train()
    return {"loss": loss / count, "bits": loss / count / 0.6931471805599453, "accuracy": right / count}


def predictions(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the logits (places, classes) where something is predicted, and the labels there."""
    logits, labels = model(**batch).logits, batch["labels"]
    if predicts_next(model):
        logits, labels = logits[:, :-1], labels[:, 1:]
    asked = labels != NO_LABEL
    return logits[asked], labels[asked]
