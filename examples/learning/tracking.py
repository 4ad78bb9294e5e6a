"""State tracking: random elements of a group, and at each the product so far. Train on 32 tokens, ask about 128.
Grazzi et al., Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues, https://arxiv.org/abs/2411.12537"""

from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.learning.task import Task, Training, answers
from linattn import LanguageModel, LanguageModelConfig

LENGTH, TRAIN_LENGTH, BATCH, TEST = 128, 32, 64, 500
# places that one figure of a measurement sums up
BLOCK = 16


def parity() -> np.ndarray:
    """Return the table of products of bits: their sum, modulo 2."""
    return np.array([[0, 1], [1, 0]])


def permutations_of_3() -> np.ndarray:
    """Return the table of products (i, j) of the six permutations of 3 things, in alphabetical order: i, then j."""
    elements = list(permutations(range(3)))
    return np.array([[elements.index(tuple(i[place] for place in j)) for j in elements] for i in elements])


def generate(rng: np.random.Generator, count: int, *, products: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Return random elements and their products from the first to each, (count, length) both."""
    tokens = rng.integers(len(products), size=(count, length))
    targets = tokens.copy()
    for place in range(1, length):
        targets[:, place] = products[targets[:, place - 1], tokens[:, place]]
    return torch.from_numpy(tokens), torch.from_numpy(targets)


class Tracking:
    """New sequences in every batch, and 500 that are four times as long to measure by."""

    def __init__(self, seed: int, path: Path | None = None, *, group: Callable[[], np.ndarray]):
        self.rng, self.products = np.random.default_rng([seed, 1]), group()
        self.test = generate(np.random.default_rng([seed, 2]), TEST, products=self.products, length=LENGTH)

    def batch(self) -> tuple[Tensor, Tensor]:
        return generate(self.rng, BATCH, products=self.products, length=TRAIN_LENGTH)

    @torch.no_grad()
    def measure(self, model: LanguageModel) -> dict[str, float]:
        """Measure the accuracy beyond the trained length, and that of each block of 16 places by its last place."""
        model.eval()
        logits, wanted = answers(model, *self.test)
        right = (logits.argmax(-1) == wanted).view(TEST, LENGTH).double().mean(0)
        model.train()
        blocks = {f"accuracy_{end}": right[end - BLOCK : end].mean().item() for end in range(BLOCK, LENGTH + 1, BLOCK)}
        loss = torch.nn.functional.cross_entropy(logits, wanted).item()
        return {"loss": loss, "accuracy": right[TRAIN_LENGTH:].mean().item(), **blocks}


def _model(elements: int, attention: str, **options: Any) -> LanguageModelConfig:
    return LanguageModelConfig(
        vocab_size=elements,
        dim=64,
        depth=2,
        num_heads=2,
        attention=attention,
        rotary=None,
        mlp_ratio=2.0,
        tie_embeddings=False,
        **options,
    )


def _task(name: str, title: str, group: Callable[[], np.ndarray], *, steps: int) -> Task:
    model = partial(_model, len(group()))
    return Task(
        name=name,
        title=title,
        training=Training(steps=steps, lr=3e-3, every=250, solved=0.999, weight_decay=0.01),
        metric="accuracy",
        others={"accuracy_32": "tokens 17–32", "accuracy_64": "tokens 49–64", "accuracy_128": "tokens 113–128"},
        length=LENGTH,
        methods={
            "softmax": model("softmax"),
            "elu": model("elu"),
            "unnormalized": model("linear_unnormalized", head_norm=True),
            "retention": model("retention", head_norm=True),
        },
        prepare=partial(Tracking, group=group),
    )


PARITY = _task("parity", "parity of bits", parity, steps=2_000)
PERMUTATIONS = _task("permutations", "products of permutations of 3", permutations_of_3, steps=2_000)
