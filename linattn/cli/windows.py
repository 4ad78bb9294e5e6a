"""Windows of `context` tokens from a long row: shuffled endlessly for training, alone or in chains, and evenly spread
for validation.

Each window begins with the last token of the previous one, but does not predict it: a pass predicts each token once."""

from functools import lru_cache
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linattn.cli.options import TrainOptions
from linattn.cli.run_folder import Run
from linattn.cli.vocabulary import token_dtype
from linattn.console.errors import CommandError
from linattn.integrations.transformers.own_model.stateful_trainer import CONTINUES
from linattn.models.loss import NO_LABEL


def open_tokens(run: Run, part: str) -> np.ndarray:
    """Return the run's tokens for "training" or "validation" as a memory map."""
    path, dtype = run.tokens(part), token_dtype(run.description["vocabulary"])
    wanted = run.description["data"][part]["tokens"] * np.dtype(dtype).itemsize
    if not path.is_file():
        raise CommandError(f"the run has lost its data: there is no {path}")
    if (size := path.stat().st_size) != wanted:
        raise CommandError(f"the run's data are damaged: {path} has {size} bytes instead of {wanted}")
    return np.memmap(path, dtype, mode="r")


def window(tokens: np.ndarray, start: int, context: int) -> dict[str, Tensor]:
    piece = torch.from_numpy(tokens[start : start + context].astype(np.int64))
    return {"input_ids": piece, "labels": piece}


@final
class TrainingWindows(Dataset):
    """`length` windows of tokens, taken in passes over the text. Each pass has its own random order and offset.

    Window i depends on the seed and on i alone, so that training can resume after any number of windows."""

    def __init__(self, tokens: np.ndarray, context: int, *, seed: int, length: int) -> None:
        self.tokens, self.context, self.seed, self.length = tokens, context, seed, length
        stride = context - 1
        # one window fewer than fits, so that there are offsets to choose from
        self.per_pass = max(1, (len(tokens) - 1) // stride - 1)
        self.slack = len(tokens) - 1 - self.per_pass * stride

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, position = divmod(index, self.per_pass)
        offset, order = _shuffle(self.seed, number, self.per_pass, self.slack)
        return window(self.tokens, offset + int(order[position]) * (self.context - 1), self.context)


@lru_cache(maxsize=1)
def _shuffle(seed: int, number: int, windows: int, slack: int) -> tuple[int, np.ndarray]:
    """Return the offset, from 0 to `slack` tokens, and the order of so many `windows` in the pass of this `number`."""
    random = np.random.default_rng((seed, number))
    return int(random.integers(slack + 1)), random.permutation(windows)


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
    window i − `rows`, or begins a chain. Only the first `rows` windows of a pass may be inside a chain and continue
    none.

    The first window of a document begins with its first token. The last window reaches into the following document, and
    no window continues it. Window i depends on the seed, the number of rows and i alone."""

    def __init__(
        self, tokens: np.ndarray, context: int, *, separator: int, seed: int, length: int, rows: int, share: float
    ) -> None:
        self.tokens, self.context, self.seed, self.length = tokens, context, seed, length
        self.rows, self.share, last = rows, share, len(tokens) - 1
        documents = np.flatnonzero(tokens == separator)
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


def training_windows(run: Run, options: TrainOptions, *, sequences: int) -> TrainingWindows | WindowChains:
    """Return the windows of all updates, each of so many `sequences`."""
    tokens, context, seed = open_tokens(run, "training"), options.context, options.seed
    length = options.limit() * sequences
    if (share := options.carry) is None:
        return TrainingWindows(tokens, context, seed=seed, length=length)
    rows = sequences * count_turns(len(tokens) // context, sequences)
    separator = run.vocabulary().separator
    return WindowChains(tokens, context, separator=separator, seed=seed, length=length, rows=rows, share=share)


def validation_windows(tokens: np.ndarray, context: int, *, most: int) -> list[dict[str, Tensor]]:
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
