"""Copying: symbols, a separator, and the same symbols again. Katharopoulos et al., Transformers are RNNs,
https://arxiv.org/abs/2006.16236, section 4.1 and appendix"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.learning.task import IGNORED, Task, Training, loss_and_accuracy
from linattn import LanguageModel, LanguageModelConfig

SYMBOLS, LENGTH, BATCH, TEST = 10, 64, 64, 1_000


def generate(rng: np.random.Generator, count: int, *, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens and targets (count, length): n symbols, a 0, the n symbols again, zeros, with n from length/4 up to
    (length − 1)/2. Asked is the copy, from the separator on. (The authors' code asks for the separator too, which comes
    at a random place that nothing tells.)"""
    n = rng.integers(length // 4, (length - 1) // 2, size=(count, 1))
    symbols = rng.integers(1, SYMBOLS + 1, size=(count, length))
    place = np.arange(length)
    copied = np.take_along_axis(symbols, np.maximum(place - n - 1, 0), axis=1)
    tokens = np.where(place < n, symbols, np.where((place > n) & (place <= 2 * n), copied, 0))
    following = np.roll(tokens, -1, axis=1)
    targets = np.where((place >= n) & (place < 2 * n), following, IGNORED)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


class Copying:
    """New sequences in every batch, and 1,000 to measure by."""

    def __init__(self, seed: int, path: Path | None = None):
        self.rng = np.random.default_rng([seed, 1])
        self.test = generate(np.random.default_rng([seed, 2]), TEST)

    def batch(self) -> tuple[Tensor, Tensor]:
        return generate(self.rng, BATCH)

    def measure(self, model: LanguageModel) -> dict[str, float]:
        loss, accuracy = loss_and_accuracy(model, *self.test)
        return {"loss": loss, "accuracy": accuracy}


def _model(attention: str) -> LanguageModelConfig:
    return LanguageModelConfig(
        vocab_size=SYMBOLS + 1,
        dim=64,
        depth=2,
        num_heads=4,
        attention=attention,
        positions="learned",
        max_length=LENGTH,
        feed_forward="gelu",
        norm="layer",
    )


TASK = Task(
    name="copying",
    title="copying",
    # the authors' own decay and, 250 steps sooner, their drop: with the cosine and 0.1, elu + 1 is right to 97 % after
    # 4,000 steps
    training=Training(steps=3_000, lr=1e-3, every=250, solved=0.995, drop=2_750, weight_decay=0.01),
    metric="accuracy",
    moments=(2_000, 2_750),
    length=LENGTH,
    methods={"softmax": _model("softmax"), "elu": _model("elu")},
    prepare=Copying,
)
