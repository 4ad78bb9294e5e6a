"""Windows of `context` tokens from a long row: shuffled endlessly for training, evenly spread for validation.

Each window begins with the last token of the previous one, but does not predict it: a pass predicts each token once."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linattn.data.row import TokenRow
from linattn.models.loss import NO_LABEL

ROUNDS = 6
"""The rounds of the network that shuffles windows."""


def window(tokens: TokenRow | np.ndarray, start: int, context: int) -> dict[str, Tensor]:
    piece = torch.from_numpy(tokens[start : start + context].astype(np.int64))
    return {"input_ids": piece, "labels": piece}


@final
class TrainingWindows(Dataset):
    """`length` windows of tokens, taken in passes over the text. Each pass has its own random order and offset.

    Window i depends on the seed and on i alone, so that training can resume after any number of windows."""

    def __init__(self, tokens: TokenRow | np.ndarray, context: int, *, seed: int, length: int) -> None:
        self.tokens, self.context, self.seed, self.length = tokens, context, seed, length
        stride = context - 1
        # one window fewer than fits, so that there are offsets to choose from
        self.per_pass = max(1, (len(tokens) - 1) // stride - 1)
        self.slack = len(tokens) - 1 - self.per_pass * stride

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return window(self.tokens, self.start(index), self.context)

    def start(self, index: int) -> int:
        """Return the place of the window's first token."""
        number, position = divmod(index, self.per_pass)
        offset, keys = _random(self.seed, number, self.slack)
        return offset + shuffled(position, self.per_pass, keys) * (self.context - 1)


@lru_cache(maxsize=1)
def _random(seed: int, number: int, slack: int) -> tuple[int, list[int]]:
    """Return the offset, from 0 to `slack` tokens, of the pass of this `number`, and the keys of its order."""
    random = np.random.default_rng((seed, number))
    return int(random.integers(slack + 1)), random.integers(1 << 63, size=ROUNDS).tolist()


def shuffled(place: int, size: int, keys: Sequence[int]) -> int:
    """Return what is at a `place` in a random order of the numbers below `size`, without a list of them.

    A Feistel network with these `keys` permutes the numbers below a power of 4; larger ones than wanted are permuted
    again. https://en.wikipedia.org/wiki/Format-preserving_encryption"""
    half = max(1, (size - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for key in keys:
            left, right = right, left ^ _mixed(right ^ key) & mask
        if (place := left << half | right) < size:
            return place


def _mixed(x: int) -> int:
    """Mix the bits of a number of 64 bits, as SplitMix64 does. Steele et al., https://doi.org/10.1145/2660193.2660195"""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor & (1 << 64) - 1
    return x ^ x >> 31


def validation_windows(tokens: TokenRow | np.ndarray, context: int, *, most: int) -> list[dict[str, Tensor]]:
    """Return at most `most` windows, evenly spread. With no limit they would predict each token once, except the first
    token and those after the last full window."""
    fitting = (len(tokens) - 1) // (context - 1)
    chosen = np.linspace(0, fitting - 1, min(most, fitting)).round().astype(np.int64)
    return [window(tokens, start * (context - 1), context) for start in chosen.tolist()]


def padded(windows: list[dict[str, Tensor]], multiple: int) -> list[dict[str, Tensor]]:
    """Return the windows, and after them some without labels, so that a `multiple` divides their number."""
    blank = windows[-1] | {"labels": torch.full_like(windows[-1]["labels"], NO_LABEL)}
    return windows + [blank] * (-len(windows) % multiple)


@final
class RepeatedBatches(Dataset):
    """Batches of windows, each of which comes `times` in a row. Accelerate distributes batches over the processes in
    turn, so that as many processes, side by side, have the same windows."""

    def __init__(self, windows: Any, batch: int, times: int) -> None:
        self.windows, self.batch, self.times = windows, batch, times

    def __len__(self) -> int:
        return len(self.windows) * self.times

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, row = divmod(index, self.batch)
        return self.windows[number // self.times * self.batch + row]
