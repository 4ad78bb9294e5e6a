"""Cases and their results, and the machine that they are from: a value that goes to JSON and back."""

import dataclasses
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, with_config
from typing_extensions import TypedDict

from linattn.cli.run_folder import timestamp
from linattn.cli.typed_json import read_json
from linattn.console.atomic import write_atomically
from linattn.console.errors import CommandError, explained
from linattn.version import __version__

FORMAT = 2
SECONDS: Final = "seconds"
BYTES: Final = "bytes"
STATE_BYTES: Final = "state bytes"
ERROR: Final = "error"
Curve = tuple[str, str, str]
Quantity = Literal["seconds", "bytes", "state bytes", "error"]


@with_config(extra="allow")
class Machine(TypedDict, extra_items=object):
    """The facts that every record has about its machine, beside others."""

    processor: str
    cores: int | None
    threads: int
    torch: str
    linattn: str
    date: str


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
    """One method doing one workload at one length. It is rebuilt from its names in any process."""

    workload: str
    method: str
    dtype: str
    n: int
    """Number of tokens, the position of a generated token, or a map's number of features."""

    @property
    def curve(self) -> Curve:
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
    """All runs of one case."""

    quantity: Quantity
    values: Annotated[tuple[float, ...], Field(min_length=1)]
    limit: float | None = None
    """Seconds that the matrix products alone would take at the rate of batched 64³ products, from the same rounds."""

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.quantity, *self.curve, self.n

    @property
    def point(self) -> Point:
        """Return the median and the spread from the fastest run to the upper quartile: noise only ever adds time, and
        what disturbed one run in seven is left out."""
        return Point(*np.quantile(self.values, (0.0, 0.5, 0.75)).tolist())


@dataclass(frozen=True)
class Dropped(Case):
    """A case that was asked for and is missing, and why."""

    reason: str


@with_config(extra="forbid")
@dataclass(frozen=True)
class Record:
    command: str
    machine: Machine
    options: dict[str, Any]
    measurements: tuple[Measurement, ...]
    dropped: tuple[Dropped, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    """Sentences for the report."""

    @property
    def machine_line(self) -> str:
        machine = self.machine
        where = machine.get("gpu") or f"{machine['processor']}, {machine['threads']} of {machine['cores']} threads"
        return f"{where}, torch {machine['torch']}, linattn {machine['linattn']}, {machine['date']}"


def describe_machine(device: str, threads: int) -> Any:
    """Return the facts of a `Machine`, and others."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    return {
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "linattn": __version__,
        "device": device,
        "date": timestamp(),
        **({"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda} if device == "cuda" else {}),
    }


def write_record(record: Record, path: Path) -> None:
    write_atomically(path, json.dumps({"format": FORMAT} | dataclasses.asdict(record), indent=1) + "\n")


def read_record(path: Path) -> Record:
    if not path.is_file():
        raise CommandError(f"there is no {path}")
    with explained(f"{path} was not written by linattn bench", ValueError, KeyError, TypeError, AttributeError):
        fields = json.loads(path.read_bytes())
        if (version := fields.pop("format")) != FORMAT:
            raise CommandError(f"{path} is a benchmark in format {version}, but this version reads {FORMAT}")
        return read_json(Record, json.dumps(fields))
