"""A case is one method doing one workload at one length. It is rebuilt from its names in any process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

FORWARD, TRAINING, DECODING = WORKLOADS = ("forward", "training", "decoding")
MODEL_TRAINING, MODEL_PREFILL, MODEL_DECODING = MODEL_WORKLOADS = ("model training", "model prefill", "model decoding")
ONE_TOKEN = (DECODING, MODEL_DECODING)
SOFTMAX, RATE = "softmax", "batched 64³ products"
Call = Callable[[], object]
Curve = tuple[str, str, str]


@dataclass(frozen=True)
class Setup:
    """The sizes and the device that all cases of a run share."""

    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    window: int = 128
    causal: bool = True
    device: str = "cpu"
    threads: int = 1


@dataclass(frozen=True)
class Case:
    workload: str
    method: str
    dtype: str
    n: int

    @property
    def curve(self) -> Curve:
        return self.workload, self.method, self.dtype

    @property
    def growth(self) -> int:
        """Return the greatest power of n with which the time may grow."""
        return (SOFTMAX in self.method) + (self.workload not in ONE_TOKEN)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class Workload(NamedTuple):
    """A call with its inputs made, the FLOP of its matrix products if they are known, and the state it starts from."""

    call: Call
    flop: float | None = None
    state: object = None
