"""What is measured: a cell is one contender doing one work at one length, rebuilt from its names in any process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from linattn.attention.named import ATTENTIONS
from linattn.cli.bench import peers

FORWARD, TRAINING, DECODING = "forward", "training", "decoding"
MODEL_TRAINING, MODEL_PREFILL, MODEL_DECODING = "model training", "model prefill", "model decoding"
WORKS = (FORWARD, TRAINING, DECODING)
MODEL_WORKS = (MODEL_TRAINING, MODEL_PREFILL, MODEL_DECODING)
Call = Callable[[], object]


@dataclass(frozen=True)
class Setup:
    """What is the same for all the cells of a run."""

    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    window: int = 128
    causal: bool = True
    device: str = "cpu"
    threads: int = 1


@dataclass(frozen=True)
class Cell:
    work: str
    method: str
    dtype: str
    n: int

    @property
    def curve(self) -> tuple[str, str, str]:
        return self.work, self.method, self.dtype

    @property
    def growth(self) -> int:
        """The power of n with which its time is expected to grow: no less than it does."""
        quadratic = "softmax" in self.method
        if self.work in (DECODING, MODEL_DECODING):
            return 1 if quadratic else 0
        return 2 if quadratic else 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class Work(NamedTuple):
    """`begin` makes what belongs to the work but not to a call of it, as the past of a token, and returns the call."""

    begin: Callable[[], Call]
    grad: bool = False
    flop: float | None = None
    """Of the matrix products in a call, where they are known."""


def is_method(name: str) -> bool:
    return name in peers.PEERS or all(part.partition(":")[0] in ATTENTIONS for part in name.split("+"))
