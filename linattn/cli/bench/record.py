"""What a benchmark found, and on which machine: a value that goes to JSON and back."""

import dataclasses
import json
import os
import platform
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from linattn.cli.errors import CommandError
from linattn.cli.whole import write_whole
from linattn.version import __version__

FORMAT = 1
SECONDS, BYTES, ERROR = "seconds", "bytes", "error"
Key = tuple[str, str, str, str, int]


@dataclass(frozen=True)
class Measurement:
    """All the runs of one contender at one point. Noise only ever adds time, so the spread is from the fastest run to
    the upper quartile: what disturbed one run in seven is not in it."""

    quantity: str
    work: str
    method: str
    dtype: str
    n: int
    """Tokens of a sequence, the position of a generated token, or a map's number of features."""
    values: tuple[float, ...]
    limit: float | None = None
    """Seconds that the matrix products alone would take at the rate of batched 64³ products, from the same rounds."""

    @property
    def key(self) -> Key:
        return self.quantity, self.work, self.method, self.dtype, self.n

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        if len(self.values) == 1:
            return self.low
        return statistics.quantiles(self.values, n=4, method="inclusive")[2]


@dataclass(frozen=True)
class Dropped:
    """What was asked for and is not there, and why."""

    work: str
    method: str
    dtype: str
    n: int
    reason: str


@dataclass(frozen=True)
class Record:
    command: str
    machine: dict[str, Any]
    options: dict[str, Any]
    measurements: tuple[Measurement, ...]
    dropped: tuple[Dropped, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    """Sentences for the report."""

    def find(self, quantity: str, work: str, dtype: str) -> dict[str, list[Measurement]]:
        """The curve of each method, in the order of n."""
        curves: dict[str, list[Measurement]] = {}
        for each in self.measurements:
            if (each.quantity, each.work, each.dtype) == (quantity, work, dtype):
                curves.setdefault(each.method, []).append(each)
        return {method: sorted(curve, key=lambda each: each.n) for method, curve in curves.items()}

    @property
    def works(self) -> list[tuple[str, str]]:
        """(work, dtype), in the order in which they came."""
        return list(dict.fromkeys((each.work, each.dtype) for each in self.measurements if each.quantity != ERROR))

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(dtype for _, dtype in self.works))


def describe_machine(device: str, threads: int) -> dict[str, Any]:
    described = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "linattn": __version__,
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if torch.device(device).type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
        described["cuda"] = torch.version.cuda
    return described


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_record(record: Record, path: Path) -> None:
    write_whole(path, json.dumps({"format": FORMAT} | dataclasses.asdict(record), indent=1) + "\n")


def read_record(path: Path) -> Record:
    try:
        fields = json.loads(path.read_bytes())
        version = fields.pop("format")
        if version != FORMAT:
            raise CommandError(f"{path} is a benchmark in format {version}, but this version reads format {FORMAT}")
        fields["measurements"] = tuple(
            Measurement(**each | {"values": tuple(each["values"])}) for each in fields["measurements"]
        )
        fields["dropped"] = tuple(Dropped(**each) for each in fields["dropped"])
        return Record(**fields | {"notes": tuple(fields["notes"])})
    except FileNotFoundError as error:
        raise CommandError(f"there is no {path}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"{path} was not written by linattn bench") from error
