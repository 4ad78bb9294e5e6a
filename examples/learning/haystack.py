"""Pairs of key and value, any other tokens, and in the end the keys in another order: what were their values? Trained
on 256 tokens, asked after up to 16,384; as the needles of https://github.com/gkamradt/LLMTest_NeedleInAHaystack."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.learning import recall
from examples.learning.task import IGNORED, Task, Training, loss_and_accuracy
from linattn import LanguageModel

PAIRS, BATCH, TEST = 4, 32, 64
LENGTHS = (256, 1_024, 4_096, 16_384)
# the first key, the first value and the first of the other tokens
KEYS, VALUES, OTHERS = 1, 64, 128


def generate(rng: np.random.Generator, count: int, *, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (count, length): the target of a key at the end is its value."""
    tokens = rng.integers(OTHERS, recall.VOCABULARY, size=(count, length))
    keys, values = (_orders(rng, range(*ends), count)[:, :PAIRS] for ends in ((KEYS, VALUES), (VALUES, OTHERS)))
    tokens[:, 0 : 2 * PAIRS : 2], tokens[:, 1 : 2 * PAIRS : 2] = keys, values
    order = _orders(rng, range(PAIRS), count)
    targets = np.full((count, length), IGNORED)
    tokens[:, -PAIRS:] = np.take_along_axis(keys, order, axis=1)
    targets[:, -PAIRS:] = np.take_along_axis(values, order, axis=1)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def _orders(rng: np.random.Generator, numbers: range, count: int) -> np.ndarray:
    """Return so many random orders of the numbers, each in a row."""
    return rng.permuted(np.tile(numbers, (count, 1)), axis=1)


class Haystack:
    """New sequences in every batch, and 64 of each length to measure by."""

    def __init__(self, seed: int, path: Path | None = None):
        self.rng = np.random.default_rng([seed, 1])
        rng = np.random.default_rng([seed, 2])
        self.tests = {length: generate(rng, TEST, length=length) for length in LENGTHS}

    def batch(self) -> tuple[Tensor, Tensor]:
        return generate(self.rng, BATCH, length=LENGTHS[0])

    def measure(self, model: LanguageModel) -> dict[str, float]:
        """Measure the accuracy of each length, and the loss of the trained one."""
        found = {length: loss_and_accuracy(model, *test) for length, test in self.tests.items()}
        accuracies = {f"accuracy_{length}": accuracy for length, (_, accuracy) in found.items()}
        return {"loss": found[LENGTHS[0]][0], "accuracy": found[LENGTHS[-1]][1], **accuracies}


TASK = Task(
    name="haystack",
    title=f"{PAIRS} pairs in a haystack",
    training=Training(steps=600, lr=3e-3, optimizer="muon", every=600),
    metric="accuracy",
    length=LENGTHS[-1],
    methods=recall.models_with_silu(
        {"softmax": recall.WITHOUT_SILU["softmax"], **recall.EQUAL_STATE, "local": recall.OTHERS["local"]}
    ),
    prepare=Haystack,
)
