"""Records of measurements and of the machine that they come from. They are written as JSON and read again."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, with_config

from linattn.cli.typed_json import read_json
from linattn.console.atomic import write_atomically
from linattn.console.errors import explained

SECONDS: Final = "seconds"
BYTES: Final = "bytes"


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
    """One workload of one method at one length, described by names and numbers only, so that any process can prepare
    it."""

    workload: str
    method: str
    dtype: str
    n: int
    """The number of tokens, or the position of a generated token."""

    @property
    def curve(self) -> tuple[str, str, str]:
        """The workload, method and dtype: the cases of one curve differ in their lengths only."""
        return self.workload, self.method, self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class Point(NamedTuple):
    low: float
    value: float
    high: float


@dataclass(frozen=True)
class Measurement(Case):
    """The values of all repetitions of one case."""

    quantity: Literal["seconds", "bytes"]
    values: Annotated[tuple[float, ...], Field(min_length=1)]

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.quantity, *self.curve, self.n

    @property
    def point(self) -> Point:
        """Return the least value, the median and the upper quartile: noise only adds time, so the fastest run has the
        least of it, and the quartile ignores one disturbed run of seven."""
        return Point(*np.quantile(self.values, (0.0, 0.5, 0.75)).tolist())


@with_config(extra="forbid")
@dataclass(frozen=True)
class Record:
    command: str
    machine: dict[str, Any]
    options: dict[str, Any]
    measurements: tuple[Measurement, ...]
    dropped: dict[str, list[str]]
    """The methods that are missing, by workload, dtype, first missing length and reason."""
    seconds: float
    format: Literal[3] = 3

    @property
    def machine_line(self) -> str:
        of = self.machine.get
        where = of("gpu") or f"{of('processor')}, {of('threads')} of {of('cores')} threads"
        return f"{where}, torch {of('torch')}, linattn {of('linattn')}, {of('date')}"


def write_record(record: Record, path: Path) -> None:
    write_atomically(path, json.dumps(dataclasses.asdict(record), indent=1) + "\n")


def read_record(path: Path) -> Record:
    with explained(f"{path} was not written by this version of linattn bench", ValueError):
        return read_json(Record, path.read_bytes())
