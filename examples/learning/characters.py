"""Characters of a text, in the setting that nanoGPT's readme gives for a CPU: 4 layers, 4 heads, 128 channels, a
context of 64, batches of 12, 2,000 steps. https://github.com/karpathy/nanoGPT"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.learning.task import IGNORED, Task, Training, loss_and_accuracy
from linattn import LanguageModel, LanguageModelConfig

LENGTH, BATCH = 64, 12
# tinyshakespeare has so many different characters
VOCABULARY = 65


def split(path: Path) -> tuple[Tensor, Tensor]:
    """The numbers of a text's characters, in their alphabetical order: the first nine tenths, and the rest."""
    text = path.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    if len(alphabet) > VOCABULARY:
        raise ValueError(f"the text may have {VOCABULARY} different characters, but {path} has {len(alphabet)}")
    number = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([number[character] for character in text])
    cut = int(0.9 * len(tokens))
    return tokens[:cut], tokens[cut:]


def windows(tokens: Tensor, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets (windows, length) that ask for every token but the first once; the last is filled up."""
    count = -(-(len(tokens) - 1) // length)
    missing = count * length - (len(tokens) - 1)
    inputs, targets = tokens[:-1], tokens[1:]
    inputs = torch.cat([inputs, inputs.new_zeros(missing)])
    targets = torch.cat([targets, targets.new_full((missing,), IGNORED)])
    return inputs.view(count, length), targets.view(count, length)


class Characters:
    """Windows at random places of the training text; measured on the whole validation text."""

    def __init__(self, seed: int, path: Path | None):
        if path is None:
            raise ValueError("characters need a text: --data PATH")
        self.rng = np.random.default_rng([seed, 1])
        self.train, validation = split(path)
        self.test = windows(validation)

    def batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.from_numpy(self.rng.integers(len(self.train) - LENGTH, size=(BATCH, 1)))
        places = starts + torch.arange(LENGTH)
        return self.train[places], self.train[places + 1]

    def measure(self, model: LanguageModel) -> dict[str, float]:
        loss, accuracy = loss_and_accuracy(model, *self.test)
        return {"loss": loss, "accuracy": accuracy}


def _model(attention: str | tuple[str, ...], **options: Any) -> LanguageModelConfig:
    return LanguageModelConfig(
        vocab_size=VOCABULARY,
        dim=128,
        depth=4,
        num_heads=4,
        attention=attention,
        window=16,
        rotary=None,
        positions="learned",
        max_length=LENGTH,
        feed_forward="gelu",
        norm="layer",
        **options,
    )


TASK = Task(
    name="characters",
    title="characters",
    needs_text=True,
    training=Training(steps=2_000, lr=1e-3, every=500),
    metric="loss",
    length=LENGTH,
    methods={
        "softmax": _model("softmax"),
        "elu": _model("elu"),
        "local3+elu1": _model("local:3+elu:1"),
        "local2+elu2": _model("local:2+elu:2"),
        "local": _model("local"),
        "softmax+convolution": _model("softmax", convolution=4),
        "elu+convolution": _model("elu", convolution=4),
        "taylor2+convolution": _model("taylor2", convolution=4, key_dim=16),
        "unnormalized+convolution": _model("linear_unnormalized", convolution=4, head_norm=True),
        **{
            f"{name}+convolution": _model(name, convolution=4, head_norm=True)
            for name in ("retention", "gla", "ssd", "delta", "gated_delta", "kda")
        },
        # the convolutions are on the projections to q, k and v instead of their inputs, with a SiLU
        "softmax+silu4": _model("softmax", convolution=4, convolution_on="projections"),
        "unnormalized+silu4": _model(
            "linear_unnormalized", convolution=4, convolution_on="projections", head_norm=True
        ),
        "gated_delta+silu4": _model("gated_delta", convolution=4, convolution_on="projections", head_norm=True),
        # three layers of the delta rule and one of windows
        "hybrid+silu4": _model(
            ("gated_delta", "gated_delta", "gated_delta", "local"),
            convolution=4,
            convolution_on="projections",
            head_norm=True,
        ),
    },
    prepare=Characters,
)
