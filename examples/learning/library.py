"""Bytes of Python's standard library at equal processor time: every 15th file is held out."""

import math
import sysconfig
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.learning.task import Task, Training, loss_and_accuracy
from linattn import LanguageModel, LanguageModelConfig

# bytes of a batch, and bytes that are predicted to measure by
BATCH, TEST = 2_048, 131_072
HELD_OUT = 15
SECONDS = 260.0


@cache
def split() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and those to measure by: all modules in alphabetical order, without tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    texts = [(folder / name).read_bytes() for name in names if not {"site-packages", "test", "tests"} & set(name.parts)]
    held_out = b"".join(texts[::HELD_OUT])
    train = b"".join(text for i, text in enumerate(texts) if i % HELD_OUT)
    return torch.frombuffer(bytearray(train), dtype=torch.uint8), torch.frombuffer(
        bytearray(held_out), dtype=torch.uint8
    )


class Library:
    """Windows at random places, and as many bytes in windows at equal distances to measure by, whatever the length. A
    batch has a window at least."""

    def __init__(self, seed: int, path: Path | None = None, *, length: int):
        self.rng, self.length = np.random.default_rng([seed, 1]), length
        self.train, held_out = split()
        starts = np.linspace(0, len(held_out) - length - 1, TEST // length).astype(np.int64)
        self.test = self._windows(held_out, starts)

    def _windows(self, text: Tensor, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        places = torch.from_numpy(starts)[:, None] + torch.arange(self.length)
        return text[places].long(), text[places + 1].long()

    def batch(self) -> tuple[Tensor, Tensor]:
        starts = self.rng.integers(len(self.train) - self.length, size=max(1, BATCH // self.length))
        return self._windows(self.train, starts)

    def measure(self, model: LanguageModel) -> dict[str, float]:
        loss, accuracy = loss_and_accuracy(model, *self.test)
        return {"bits": loss / math.log(2), "loss": loss, "accuracy": accuracy}


def _model(attention: str, **options: Any) -> LanguageModelConfig:
    return LanguageModelConfig(
        vocab_size=256, dim=128, depth=4, num_heads=4, attention=attention, convolution=4, **options
    )


MODELS = {
    "softmax+convolution": _model("softmax", rotary=10_000.0),
    "local+convolution": _model("local", window=64, rotary=10_000.0),
    "gated_delta+convolution": _model("gated_delta", rotary=None, head_norm=True),
    # two heads of windows and two others in each layer; three layers of the delta rule and one of windows
    "local+elu+convolution": _model("local+elu", window=64, rotary=10_000.0),
    "local+gated_delta+convolution": _model("local+gated_delta", window=64, rotary=None, head_norm=True),
    "hybrid+convolution": _model(("gated_delta",) * 3 + ("local",), window=64, rotary=None, head_norm=True),
}
# the convolutions are on the projections to q, k and v instead of their inputs, with a SiLU
SILU = {
    name.replace("convolution", "silu4"): replace(model, convolution_on="projections") for name, model in MODELS.items()
}


def _task(length: int) -> Task:
    return Task(
        name=f"bytes{length}",
        title=f"bytes, {length:,} at a time",
        training=Training(steps=100_000, seconds=SECONDS, lr=2e-3, every=250),
        metric="bits",
        length=length,
        methods=MODELS | SILU,
        prepare=partial(Library, length=length),
    )


TASKS = (_task(256), _task(1_024), _task(4_096))
