"""State tracking: random elements of a group, and at each the product so far. Train on 32 tokens, ask about 128.
Grazzi et al., Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues, https://arxiv.org/abs/2411.12537"""

from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.learning.task import Task, Training, answers
from linattn import LanguageModel, LanguageModelConfig

LENGTH, TRAIN_LENGTH, BATCH, TEST = 128, 32, 64, 250
# places that one figure of a measurement sums up
BLOCK = 16


@dataclass(frozen=True)
class Group:
    """The products (i, j) of its elements, i first, and the elements that sequences are made of."""

    products: np.ndarray
    generators: tuple[int, ...]


def bits() -> Group:
    """Return the bits, whose product is their sum modulo 2."""
    return Group(np.array([[0, 1], [1, 0]]), (0, 1))


def permutations_of(things: int, *, swaps: bool = False) -> Group:
    """Return the permutations of some things, in alphabetical order; as generators all, or those that move none or swap
    two."""
    elements = list(permutations(range(things)))
    index = {element: i for i, element in enumerate(elements)}
    products = [[index[tuple(i[place] for place in j)] for j in elements] for i in elements]
    moved = [sum(i != place for place, i in enumerate(element)) for element in elements]
    return Group(np.array(products), tuple(i for i, count in enumerate(moved) if count <= 2 or not swaps))


def generate(rng: np.random.Generator, count: int, group: Group, *, length: int) -> tuple[Tensor, Tensor]:
    """Return random generators and their products from the first to each, (count, length) both."""
    tokens = rng.choice(group.generators, size=(count, length))
    targets = tokens.copy()
    for place in range(1, length):
        targets[:, place] = group.products[targets[:, place - 1], tokens[:, place]]
    return torch.from_numpy(tokens), torch.from_numpy(targets)


class Tracking:
    """New sequences in every batch, and 250 that are four times as long to measure by."""

    def __init__(self, seed: int, path: Path | None = None, *, group: Group):
        self.rng, self.group = np.random.default_rng([seed, 1]), group
        self.test = generate(np.random.default_rng([seed, 2]), TEST, group, length=LENGTH)

    def batch(self) -> tuple[Tensor, Tensor]:
        return generate(self.rng, BATCH, self.group, length=TRAIN_LENGTH)

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


def _task(name: str, title: str, group: Group, *, steps: int = 750, writes: tuple[int, ...] = (1, 2)) -> Task:
    model = partial(_model, len(group.products))
    return Task(
        name=name,
        title=title,
        training=Training(steps=steps, lr=3e-3, every=150, solved=0.999, weight_decay=0.01),
        metric="accuracy",
        length=LENGTH,
        methods={
            "softmax": model("softmax"),
            "elu": model("elu"),
            "retention": model("retention", head_norm=True),
            "ssd": model("ssd", head_norm=True),
            "delta": model("delta", head_norm=True),
            **{
                f"{name}+beta2" + f"+writes{count}" * (count > 1): model(
                    name, head_norm=True, beta_limit=2.0, writes=count
                )
                for count in writes
                for name in ("delta", "gated_delta", "kda")
            },
        },
        prepare=partial(Tracking, group=group),
    )


TASKS = (
    _task("parity", "parity of bits", bits()),
    _task("swaps", "swaps of 2 of 3 things", permutations_of(3, swaps=True)),
    _task("permutations", "permutations of 3 things", permutations_of(3)),
    _task("swaps5", "swaps of 2 of 5 things", permutations_of(5, swaps=True), steps=3000),
    _task("permutations5", "permutations of 5 things", permutations_of(5), steps=3000, writes=(1, 2, 4)),
)
