"""Multi-query associative recall: pairs of key and value, then each key once, in any order; what was its value?
Arora et al., Zoology, https://arxiv.org/abs/2312.04927, section 3; figure 2 has the blanks that are here too."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
    """20,000 sequences, shuffled again in each epoch, and 1,000 others to measure by."""

    def __init__(self, seed: int, path: Path | None = None, *, length: int = LENGTH, pairs: int = PAIRS):
        self.rng = np.random.default_rng([seed, 1])
        self.tokens, self.targets = generate(self.rng, TRAIN, length=length, pairs=pairs)
        self.test = generate(np.random.default_rng([seed, 2]), TEST, length=length, pairs=pairs)
        self.order = np.empty(0, np.int64)

    def batch(self) -> tuple[Tensor, Tensor]:
        if len(self.order) < BATCH:
            self.order = self.rng.permutation(TRAIN)
        rows, self.order = self.order[:BATCH], self.order[BATCH:]
        return self.tokens[rows], self.targets[rows]

    def measure(self, model: LanguageModel) -> dict[str, float]:
        loss, accuracy = loss_and_accuracy(model, *self.test)
        return {"loss": loss, "accuracy": accuracy}


def _model(attention: str, **options: Any) -> LanguageModelConfig:
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
        **options,
    )


# about 4,096 numbers of state; values have 64 channels, and so have queries and keys where nothing is said
EQUAL_STATE = {
    "taylor2:10": _model("taylor2", key_dim=10),
    "elu": _model("elu"),
    "unnormalized": _model("linear_unnormalized", head_norm=True),
    "retention": _model("retention", head_norm=True),
    "gla": _model("gla", head_norm=True),
    "ssd": _model("ssd", head_norm=True),
    "delta": _model("delta", head_norm=True),
    "gated_delta": _model("gated_delta", head_norm=True),
    "kda": _model("kda", head_norm=True),
    "rwkv7": _model("rwkv7", head_norm=True),
}
# about 2,048: a name's number is that of its channels in queries and keys
HALF_STATE = {
    "taylor2:6": _model("taylor2", key_dim=6),
    **{f"{name}:32": replace(model, key_dim=32) for name, model in EQUAL_STATE.items() if name != "taylor2:10"},
}


def with_silu(method: str) -> str:
    """Return the name of a method that has a SiLU on q, k and v: "delta:32" becomes "delta+silu:32"."""
    kind, colon, channels = method.partition(":")
    return f"{kind}+silu{colon}{channels}"


def models_with_silu(models: Mapping[str, LanguageModelConfig]) -> dict[str, LanguageModelConfig]:
    """The models with a SiLU on q, k and v, as DeltaNet has. The convolution of width 1 is a factor and a bias."""
    return {
        with_silu(name): replace(model, convolution=1, convolution_on="projections") for name, model in models.items()
    }


def _task(name: str, methods: Mapping[str, LanguageModelConfig], *, length: int, pairs: int) -> Task:
    return Task(
        name=name,
        title=f"recall of {pairs} pairs, {length} tokens",
        training=Training(steps=2_000, lr=3e-3, every=200, solved=0.999),
        metric="accuracy",
        length=length,
        methods=methods,
        prepare=partial(Recall, length=length, pairs=pairs),
    )


WITHOUT_SILU = {"softmax": _model("softmax"), **EQUAL_STATE, **HALF_STATE}
# more channels in queries and keys: a state of 7,808 numbers, less than half of softmax's
LARGER = {"delta:120": _model("delta", head_norm=True, key_dim=120)}
HARDER = WITHOUT_SILU | models_with_silu(WITHOUT_SILU | LARGER)
OTHERS = {
    "taylor2": _model("taylor2", key_dim=16),
    "relu": _model("relu"),
    "favor": _model("favor", key_dim=32),
    "local": _model("local"),
}
# a second convolution, on the inputs of q, k and v
CONVOLUTION = {"delta+convolution": _model("delta", head_norm=True, convolution=4)}
TASKS = (
    _task("recall", HARDER | OTHERS, length=LENGTH, pairs=PAIRS),
    _task("recall32", HARDER | LARGER | CONVOLUTION, length=LENGTH, pairs=32),
    _task("recall64", HARDER, length=256, pairs=64),
)
