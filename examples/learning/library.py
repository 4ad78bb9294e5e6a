"""Bytes at equal processor time: of Python's standard library, of which every 15th file is held out, or of another
text, of which the last tenth is."""

import math
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.learning.task import IGNORED, Data, Task, Training, loss_and_accuracy
from linattn import LanguageModel, LanguageModelConfig

# channels of models with 0.2 to 10 million weights
WIDTHS = (64, 128, 192, 288, 448)
# bytes of a batch, and bytes that are predicted to measure by
BATCH, TEST = 2_048, 131_072
# passages that are read twice, bytes of one, and of another text between the two readings
PASSAGES, PASSAGE, GAP = 64, 96, 64
HELD_OUT = 15
SECONDS, LONG_SECONDS = 260.0, 1_800.0


@cache
def split(text: Path | None = None) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and those to measure by, of a file or of all modules in alphabetical order, without
    tests."""
    if text is not None:
        content = text.read_bytes()
        cut = len(content) * 9 // 10
        return _bytes(content[:cut]), _bytes(content[cut:])
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    texts = [(folder / name).read_bytes() for name in names if not {"site-packages", "test", "tests"} & set(name.parts)]
    held_out = b"".join(texts[::HELD_OUT])
    train = b"".join(text for i, text in enumerate(texts) if i % HELD_OUT)
    return _bytes(train), _bytes(held_out)


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Library:
    """Windows at random places, and as many bytes in windows at equal distances to measure by, whatever the length. A
    batch has a window at least."""

    def __init__(self, seed: int, path: Path | None = None, *, length: int):
        self.rng, self.length = np.random.default_rng([seed, 1]), length
        self.train, held_out = split(path)
        starts = np.linspace(0, len(held_out) - length - 1, TEST // length).astype(np.int64)
        self.test = self._windows(held_out, starts)
        self.repeats = repeats(held_out)

    def _windows(self, text: Tensor, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        places = torch.from_numpy(starts)[:, None] + torch.arange(self.length)
        return text[places].long(), text[places + 1].long()

    def batch(self) -> tuple[Tensor, Tensor]:
        starts = self.rng.integers(len(self.train) - self.length, size=max(1, BATCH // self.length))
        return self._windows(self.train, starts)

    def measure(self, model: LanguageModel) -> dict[str, float]:
        loss, accuracy = loss_and_accuracy(model, *self.test)
        again, first = (loss_and_accuracy(model, *texts)[0] for texts in self.repeats)
        saved = (first - again) / math.log(2)
        return {"bits": loss / math.log(2), "loss": loss, "accuracy": accuracy, "saved": saved}


def repeats(text: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return texts that have a passage, other bytes and the passage again, and texts with yet another passage in the
    first one's place; asked is the second passage alone, but for its first byte."""
    size = 2 * PASSAGE + GAP
    starts = torch.linspace(0, len(text) - size, PASSAGES).long()
    passages = text[starts[:, None] + torch.arange(size)].long()
    again = torch.cat([passages[:, -PASSAGE:], passages[:, PASSAGE:]], 1)
    return [
        (x[:, :-1], torch.where(torch.arange(1, size) > size - PASSAGE, x[:, 1:], IGNORED)) for x in (again, passages)
    ]


def _code(seed: int, _: Path | None, *, length: int) -> Library:
    return Library(seed, length=length)


def _text(seed: int, path: Path | None, *, length: int) -> Library:
    if path is None:
        raise ValueError("bytes of a text need the text: --data PATH")
    return Library(seed, path, length=length)


def _model(attention: str | tuple[str, ...], **options: Any) -> LanguageModelConfig:
    return LanguageModelConfig(
        vocab_size=256, dim=128, depth=4, num_heads=4, attention=attention, convolution=4, **options
    )


def _hybrid(*layers: str, window: int = 64) -> LanguageModelConfig:
    return _model(layers, window=window, rotary=None, head_norm=True)


MODELS = {
    "softmax+convolution": _model("softmax", rotary=10_000.0),
    "local+convolution": _model("local", window=64, rotary=10_000.0),
    "local256+convolution": _model("local", window=256, rotary=10_000.0),
    "gated_delta+convolution": _model("gated_delta", rotary=None, head_norm=True),
    "ssd+convolution": _model("ssd", rotary=None, head_norm=True),
    "gla+convolution": _model("gla", rotary=None, head_norm=True),
    "kda+convolution": _model("kda", rotary=None, head_norm=True),
    "rwkv7+convolution": _model("rwkv7", rotary=None, head_norm=True),
    # two heads of windows and two others in each layer; three layers of the delta rule and one of windows
    "local+elu+convolution": _model("local+elu", window=64, rotary=10_000.0),
    "local+gated_delta+convolution": _model("local+gated_delta", window=64, rotary=None, head_norm=True),
    "hybrid+convolution": _hybrid("gated_delta", "gated_delta", "gated_delta", "local"),
    "hybrid256+convolution": _hybrid("gated_delta", "gated_delta", "gated_delta", "local", window=256),
    # the layer of windows in another place, and softmax in its place
    "hybrid2+convolution": _hybrid("gated_delta", "local", "gated_delta", "gated_delta"),
    "softmax hybrid+convolution": _hybrid("gated_delta", "gated_delta", "gated_delta", "softmax"),
}
# queries and keys of more channels than 32, and so larger states
MODELS |= {
    f"hybrid256+keys{width}+convolution": replace(MODELS["hybrid256+convolution"], key_dim=width) for width in (64, 128)
}
# the convolutions are on the projections to q, k and v instead of their inputs, with a SiLU
SILU = {
    name.replace("convolution", "silu4"): replace(model, convolution_on="projections") for name, model in MODELS.items()
}


def _task(name: str, title: str, length: int, prepare: Callable[..., Data], seconds: float = SECONDS) -> Task:
    return Task(
        name=f"{name}{length}",
        title=f"{title}, {length:,} at a time",
        training=Training(steps=100_000, seconds=seconds, lr=2e-3, every=250),
        metric="bits",
        length=length,
        methods=MODELS | SILU,
        prepare=partial(prepare, length=length),
        needs_text=prepare is _text,
    )


TASKS = tuple(_task("bytes", "bytes", length, _code) for length in (256, 1_024, 4_096))
SCALING = Task(
    name="scaling",
    title="bytes, 512 at a time, 300 steps",
    training=Training(steps=300, lr=5e-3, optimizer="muon", every=100),
    metric="bits",
    length=512,
    # heads of 32 channels; a name's number is that of the model's
    methods={
        f"{name}:{dim}": replace(SILU[f"{name}+silu4"], dim=dim, num_heads=dim // 32)
        for name in ("softmax", "gated_delta", "hybrid")
        for dim in WIDTHS
    },
    prepare=partial(_code, length=512),
)
# which width for which time: the models of the default layers, with half of the usual warm-up, as few steps are taken
SIZES = tuple(
    replace(
        SCALING,
        name=f"minutes{minutes}",
        title=f"{minutes} minutes",
        training=replace(SCALING.training, steps=100_000, seconds=60.0 * minutes, every=100_000, warmup=50),
        methods={name: model for name, model in SCALING.methods.items() if name.startswith("hybrid")},
    )
    for minutes in (2, 10, 60)
)
LONG = (_task("long", "bytes for half an hour", 256, _code, seconds=LONG_SECONDS),)
PROSE, PLAYS = (
    tuple(_task(text, f"bytes of {text}", length, _text) for length in (256, 1_024)) for text in ("prose", "plays")
)
# what is run only if it is named: it takes long, or a text
RARE = (SCALING, *SIZES, *LONG, *PROSE, *PLAYS)
