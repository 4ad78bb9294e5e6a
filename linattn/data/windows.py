"""Windows of `context` tokens from a long row: shuffled endlessly for training, alone or in chains, and evenly spread
for validation.

Each window begins with the last token of the previous one, but does not predict it: a pass predicts each token once."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linattn.data.row import TokenRow
from linattn.integrations.transformers.own_model.stateful_trainer import CONTINUES
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


TURNS, LEAST_PER_ROW = 16, 32


def count_turns(windows: int, sequences: int) -> int:
    """Return the number of updates, each of so many `sequences`, from a window to the next window of its document.
    Updates that read the same documents one after another teach less (docs/learning.md). Data of few `windows` have a
    smaller number, so that each row has at least `LEAST_PER_ROW` of them per pass."""
    return min(TURNS, max(1, windows // (sequences * LEAST_PER_ROW)))


@final
class WindowChains(Dataset):
    """`length` windows in passes over all documents. Each pass cuts the documents into chains of consecutive windows
    and shuffles the chains. The first window of a document begins a chain; of all other windows this `share`, chosen at
    random, continues the chain of the window before, and the rest begins chains. Window i of the data set continues
    window i − `rows`, or begins a chain. Among the first `rows` windows of a pass, some are inside a chain, but
    continue no window.

    The first window of a document begins with its first token. The last window reaches into the following document, and
    no window continues it. Window i depends on the seed, the number of rows and i alone."""

    def __init__(self, tokens: TokenRow, context: int, *, seed: int, length: int, rows: int, share: float) -> None:
        self.tokens, self.context, self.seed, self.length = tokens, context, seed, length
        self.rows, self.share, last = rows, share, len(tokens) - 1
        documents = tokens.document_starts(0, len(tokens))
        # the last target of a document is the separator of the next one
        sizes = np.append(documents[1:], last) - documents
        counts = np.minimum(-(-sizes // (context - 1)), (last - documents) // (context - 1))
        within = _count_up(counts)
        self.starts = np.repeat(documents, counts) + within * (context - 1)
        self.is_first = within == 0
        self.per_row = max(1, len(self.starts) // rows)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, row = divmod(index, self.rows)
        number, position = divmod(step, self.per_row)
        order, continues = _chains(self, number)
        place = (row * self.per_row + position) % len(order)
        item = window(self.tokens, int(self.starts[order[place]]), self.context)
        return item | {CONTINUES: torch.tensor(position > 0 and bool(continues[place]))}


@lru_cache(maxsize=1)
def _chains(windows: WindowChains, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows in the order of the pass of this `number`, and which of them continue the window before."""
    random = np.random.default_rng((windows.seed, number))
    begins = np.flatnonzero(windows.is_first | (random.random(len(windows.starts)) >= windows.share))
    lengths = np.append(begins[1:], len(windows.starts)) - begins
    chains = random.permutation(len(begins))
    within = _count_up(lengths[chains])
    order = np.repeat(begins[chains], lengths[chains]) + within
    # the rows of a batch have equal parts of the order; they begin at other places in each pass
    turn = int(random.integers(len(order)))
    return np.roll(order, turn), np.roll(within > 0, turn)


def _count_up(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, … up to each length, one after another."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


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
