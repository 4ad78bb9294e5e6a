"""A small encoder that fills in masked characters with softmax attention: what the Linformer paper trains, in minutes.

python -m examples.talk.masked --data input.txt --out runs/masked"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from examples.arguments import existing
from examples.learning.characters import VOCABULARY, split
from examples.learning.task import IGNORED, Training, loss_and_accuracy
from examples.learning.training import fit
from linattn import FeedForward, MultiheadAttention, SoftmaxAttention
from linattn.cli.argument_types import COUNT
from linattn.models import SequenceModel
from linattn.nn.branch import Branch
from linattn.nn.positions import LearnedPositions
from linattn.nn.residual import ResidualSequence

LENGTH, BATCH, TEST = 512, 8, 200
DIM, DEPTH, HEADS = 128, 3, 4
MASK = VOCABULARY
WEIGHTS = "softmax.pt"
SHARE = 0.15
SETTINGS = Training(steps=400, lr=2e-3, every=100)


def make_model() -> SequenceModel:
    """Rotary positions beside the learned ones let attention find neighbours within minutes."""
    embedding = nn.Embedding(VOCABULARY + 1, DIM)
    nn.init.normal_(embedding.weight, std=0.02)
    parts = [
        part
        for _ in range(DEPTH)
        for part in (MultiheadAttention(DIM, HEADS, SoftmaxAttention(), rotary=10_000.0), FeedForward(DIM, 4 * DIM))
    ]
    return SequenceModel(
        embedding,
        ResidualSequence(Branch(part, norm=nn.LayerNorm(DIM)) for part in parts),
        positions=LearnedPositions(LENGTH, DIM),
        norm=nn.LayerNorm(DIM),
        head=nn.Linear(DIM, VOCABULARY),
    )


def rng(stream: int, seed: int = 0) -> np.random.Generator:
    """1 draws training's windows and masks, 2 those of the measurement."""
    return np.random.default_rng([seed, stream])


def masked(tokens: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """The tokens with some masked, and what these were."""
    hidden = torch.from_numpy(random.random(tuple(tokens.shape)) < SHARE)
    return tokens.masked_fill(hidden, MASK), tokens.masked_fill(~hidden, IGNORED)


class MaskedCharacters:
    """Windows at random places of the training text; measured on windows spread over the validation text."""

    def __init__(self, path: Path, seed: int):
        self.rng = rng(1, seed)
        self.train, validation = split(path)
        self.test = masked(windows(validation, TEST), rng(2, seed))

    def batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.from_numpy(self.rng.integers(len(self.train) - LENGTH, size=(BATCH, 1)))
        return masked(self.train[starts + torch.arange(LENGTH)], self.rng)

    def measure(self, model: SequenceModel) -> dict[str, float]:
        loss, accuracy = loss_and_accuracy(model, *self.test)  # type: ignore[arg-type]
        return {"loss": loss, "accuracy": accuracy}


def windows(tokens: Tensor, count: int) -> Tensor:
    """As many windows, evenly spread."""
    starts = np.linspace(0, len(tokens) - LENGTH, count).astype(np.int64)
    return tokens[torch.from_numpy(starts)[:, None] + torch.arange(LENGTH)]


def train(data: Path, *, seed: int = 0, settings: Training = SETTINGS) -> tuple[SequenceModel, list[dict[str, float]]]:
    """The model, and what was measured on the way."""
    torch.manual_seed(seed)
    model = make_model()
    curve = fit(model, MaskedCharacters(data, seed), settings, print)  # type: ignore[arg-type]
    return model.eval(), curve


def load(folder: Path) -> SequenceModel:
    model = make_model()
    model.load_state_dict(torch.load(folder / WEIGHTS, weights_only=True))
    return model.eval()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=existing, required=True, help="a text, such as tinyshakespeare's input.txt")
    parser.add_argument("--steps", **COUNT, default=SETTINGS.steps)
    parser.add_argument("--out", type=Path, required=True, help="the folder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, curve = train(options.data, settings=replace(SETTINGS, steps=options.steps))
    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), options.out / WEIGHTS)
    (options.out / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")


if __name__ == "__main__":
    main()
