"""A task of the runner: data, models, and the length of their training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import LanguageModel, LanguageModelConfig

IGNORED = -100
"""The target where nothing is asked."""

# tokens that are evaluated at once
CHUNK = 16_384


class Data(Protocol):
    """Batches to train on, and what the model is measured by."""

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and targets, (batch, n) each."""
        ...

    def measure(self, model: LanguageModel) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """An optimizer with a linear warm-up, and a cosine down to a tenth of the learning rate."""

    steps: int
    seconds: float | None = None
    """Processor time after which training ends before its last step; the cosine follows its share."""
    lr: float
    optimizer: str = "adamw"
    """Or "muon": the matrices of hidden layers take its steps, all other weights those of AdamW."""
    every: int
    """Steps between measurements."""
    solved: float = 2.0
    """The accuracy at which training may end before its last step."""
    warmup: int = 100
    drop: int | None = None
    """Instead of the cosine: the learning rate is constant, and a tenth from this step on."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    title: str
    """Its name in pictures."""
    training: Training
    metric: str
    """The figure of `Data.measure` in the tables and curves."""
    moments: tuple[int, ...] = ()
    """Steps that have a column of their own beside the last."""
    length: int
    """Tokens of a sequence."""
    methods: Mapping[str, LanguageModelConfig]
    prepare: Callable[[int, Path | None], Data]
    """Data from a seed, and a file if the task needs one."""
    needs_text: bool = False


def label(method: str) -> str:
    """Return the name of a method in pictures and tables."""
    return method.replace("+", " + ")


def answers(model: LanguageModel, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and targets of the places where something is asked, (places, vocabulary) and (places); no other logits
    are computed."""
    asked = targets != IGNORED
    return model.logits(model.hidden(tokens)[asked]), targets[asked]


@torch.no_grad()
def loss_and_accuracy(model: LanguageModel, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """Means over all places where something is asked."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    rows = max(1, CHUNK // tokens.shape[1])
    for piece in zip(tokens.split(rows), targets.split(rows), strict=True):
        logits, wanted = answers(model, *piece)
        loss += F.cross_entropy(logits, wanted, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
        count += len(wanted)
    model.train()
    return loss / count, right / count
