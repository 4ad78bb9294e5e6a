"""Multi-query associative recall: pairs of key and value, then each key once, in any order; what was its value?
Arora et al., Zoology, https://arxiv.org/abs/2312.04927, section 3; figure 2 has the blanks that are here too."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.learning.task import IGNORED, Task, Training, loss_and_accuracy
from linattn import LanguageModel, LanguageModelConfig

VOCABULARY, LENGTH, PAIRS = 256, 128, 16
TRAIN, TEST, BATCH = 20_000, 1_000, 64


def generate(
    rng: np.random.Generator, count: int, *, length: int = LENGTH, pairs: int = PAIRS
) -> tuple[Tensor, Tensor]:
    """Tokens and targets (count, length): keys are 1 … 127, values 128 … 255, blanks 0; the target of a key that is
    asked is its value. It is asked an even number of places after the pairs; near ones are likelier, p ~ gap^-0.99."""
    keys = 1 + _choose(rng, np.zeros(VOCABULARY // 2 - 1), count, pairs)
    values = VOCABULARY // 2 + _choose(rng, np.zeros(VOCABULARY // 2), count, pairs)
    gaps = (length - 2 * pairs) // 2
    places = 2 * pairs + 2 * _choose(rng, -0.99 * np.log(np.arange(1, gaps + 1)), count, pairs)
    tokens, targets = np.zeros((count, length), np.int64), np.full((count, length), IGNORED)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(targets, places, values, axis=1)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def _choose(rng: np.random.Generator, log_weights: np.ndarray, count: int, picks: int) -> np.ndarray:
    """Draws without replacement, `count` times: the largest of log p + Gumbel noise, in their order."""
    noisy = log_weights + rng.gumbel(size=(count, len(log_weights)))
    return np.argsort(-noisy, axis=1)[:, :picks]


class Recall:
    """20,000 sequences, shuffled anew in each epoch, and 1,000 others to measure by."""

    def __init__(self, seed: int, path: Path | None = None):
        self.rng = np.random.default_rng([seed, 1])
        self.tokens, self.targets = generate(self.rng, TRAIN)
        self.test = generate(np.random.default_rng([seed, 2]), TEST)
        self.order = np.empty(0, np.int64)

    def batch(self) -> tuple[Tensor, Tensor]:
        if len(self.order) < BATCH:
            self.order = self.rng.permutation(TRAIN)
        rows, self.order = self.order[:BATCH], self.order[BATCH:]
        return self.tokens[rows], self.targets[rows]

    def measure(self, model: LanguageModel) -> dict[str, float]:
        loss, accuracy = loss_and_accuracy(model, *self.test)
        return {"loss": loss, "accuracy": accuracy}


def _model(attention: str) -> LanguageModelConfig:
    """A gated convolution of width 3, then one one-head attention: no positions and no feed-forward."""
    return LanguageModelConfig(
        vocab_size=VOCABULARY,
        dim=64,
        depth=2,
        num_heads=1,
        attention=("convolution:3", attention),
        window=16,
        rotary=None,
        feed_forward="none",
    )


TASK = Task(
    name="recall",
    training=Training(steps=2_000, lr=3e-3, every=200, solved=0.999),
    metric="accuracy",
    length=LENGTH,
    methods={
        "softmax": _model("softmax"),
        "taylor2": replace(_model("taylor2"), key_dim=16),
        "elu": _model("elu"),
        "relu": _model("relu"),
        "favor": replace(_model("favor"), key_dim=32),
        "unnormalized": replace(_model("linear_unnormalized"), head_norm=True),
        "retention": replace(_model("retention"), head_norm=True),
        "local": _model("local"),
    },
    prepare=Recall,
)
