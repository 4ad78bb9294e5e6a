"""Recall without order, learned by Linformer, by a kernel, and by both: pairs of key and value, and each key once more.
After Arora et al., Zoology, https://arxiv.org/abs/2312.04927

    python -m examples.talk.lookup --out docs/talk-lookup.jsonl     # what the file has is not run again

The pairs stand at the same places in every sequence, or, "moved", anywhere: Linformer weighs tokens by their places."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from examples.learning.recall import LENGTH, PAIRS, VOCABULARY, Recall
from examples.learning.run import append, read
from examples.learning.task import Training
from examples.learning.training import fit
from examples.talk.combining import FeaturesOfProjected, ProjectedFeatures
from linattn import (
    ElementwiseFeatureMap,
    GatedConvolution,
    InnerAttention,
    LearnedProjection,
    LinearAttention,
    LinformerAttention,
    MultiheadAttention,
    SoftmaxAttention,
)
from linattn.models import SequenceModel
from linattn.nn.branch import Branch
from linattn.nn.residual import ResidualSequence

DIM, PROJECTED = 64, 32
SETTINGS = Training(steps=1_000, lr=3e-3, every=200, solved=0.999)


def elu() -> ElementwiseFeatureMap:
    return ElementwiseFeatureMap("elu_plus_one")


def projection() -> LearnedProjection:
    return LearnedProjection(LENGTH, PROJECTED)


ATTENTIONS: dict[str, Callable[[], InnerAttention]] = {
    "softmax": SoftmaxAttention,
    "linear": lambda: LinearAttention(elu()),
    "linformer": lambda: LinformerAttention(projection()),
    "projected_features": lambda: ProjectedFeatures(elu(), projection()),
    "features_of_projected": lambda: FeaturesOfProjected(elu(), projection()),
}


def moved(tokens: Tensor, targets: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Each row turned by a number of places of its own, that splits no pair."""
    length = tokens.shape[1]
    offsets = torch.from_numpy(rng.integers(length - 2 * PAIRS, size=(len(tokens), 1)))
    places = (torch.arange(length) - offsets) % length
    return tokens.gather(1, places), targets.gather(1, places)


class Moved(Recall):
    """Recall, with the pairs anywhere."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.offsets = np.random.default_rng([seed, 3])
        self.test = moved(*self.test, np.random.default_rng([seed, 4]))

    def batch(self) -> tuple[Tensor, Tensor]:
        return moved(*super().batch(), self.offsets)


TASKS: dict[str, Callable[[int], Recall]] = {"same places": Recall, "moved": Moved}


def make_model(attention: str) -> SequenceModel:
    """A gated convolution of width 3, then attention of one head, as in the causal task of examples.learning."""
    embedding = nn.Embedding(VOCABULARY, DIM)
    nn.init.normal_(embedding.weight, std=0.02)
    parts = (GatedConvolution(DIM, 3), MultiheadAttention(DIM, 1, ATTENTIONS[attention]()))
    return SequenceModel(
        embedding,
        ResidualSequence(Branch(part, norm=nn.RMSNorm(DIM)) for part in parts),
        norm=nn.RMSNorm(DIM),
        head=nn.Linear(DIM, VOCABULARY, bias=False),
    )


def train(task: str, attention: str, *, seed: int = 0, settings: Training = SETTINGS) -> dict[str, Any]:
    source = TASKS[task](seed)
    torch.manual_seed(seed)
    model, start = make_model(attention), time.process_time()
    curve = fit(model, source, settings, lambda point: print(task, attention, point, flush=True))  # type: ignore[arg-type]
    return {
        "task": task,
        "attention": attention,
        "seed": seed,
        "curve": curve,
        "cpu_seconds": round(time.process_time() - start, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of JSON lines")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    done = {(run["task"], run["attention"]) for run in read(options.out)}
    for task in TASKS:
        for attention in ATTENTIONS:
            if (task, attention) not in done:
                append(options.out, train(task, attention))


if __name__ == "__main__":
    main()
