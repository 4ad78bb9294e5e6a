"""The kernels on this machine's GPU, in one call: are they right, and how fast, beside what else there is.

    PYTHONPATH=. python benchmarks/gpu.py [--json FILE] [--only values,forward,…] [--contenders] [--smallest]

Each section is a process of its own with a limit, as a fault of a GPU ends whatever comes after it in the same process.
Sections come in the order of their worth: values at the tuned tiles, against float64; forward and training; other
tiles; long sequences; single tokens, eager and in a CUDA graph; what φ, the denominator and a decay cost; softmax
attention; a memory check; language models; the laws. The JSON has a line per row, written when the row is done.

Times are medians of single calls, each after the second-level cache was replaced by reading, and with the queue full,
so that neither the cache nor the time that Python takes to launch counts. Shares are the least bytes that a call must
move, over its time, over what a copy reaches in the same process. Results are compared with a float32 run of `chunked`
before they are timed. `--smallest` runs everything once on tiny shapes, without a GPU too (TRITON_INTERPRET=1)."""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_rows import SECTIONS, Row
from torch import Tensor

LAWS = Path(__file__).parents[1] / "tests" / "ops" / "triton" / "laws"
# seconds for each section, in the order of their worth
LIMITS = {
    "values": 150, "forward": 60, "training": 90, "tiles": 100, "long": 40, "step": 30, "ablations": 60,
    "softmax": 40, "memory": 120, "bidirectional": 40, "dtypes": 60, "local": 60, "models": 200, "contenders": 200,
    "laws": 500,
}  # fmt: skip

Call = Callable[[], object]


class Timing(NamedTuple):
    """Seconds."""

    median_s: float
    min_s: float
    max_s: float


class Machine:
    """The place of the measurements: a GPU, or this process where there is none."""

    def __init__(self, smallest: bool, repeats: int) -> None:
        self.smallest, self.repeats = smallest, 1 if smallest else repeats
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.other = torch.zeros(1 if smallest else 2**26, device=self.device)

    def time(self, call: Call) -> Timing:
        for _ in range(0 if self.smallest else 3):
            call()
        seconds = self._here(call) if self.device.type == "cpu" else self._queued(call)
        return Timing(statistics.median(seconds), min(seconds), max(seconds))

    def _here(self, call: Call) -> list[float]:
        start = time.perf_counter()
        call()
        return [time.perf_counter() - start]

    def _queued(self, call: Call) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for start, end in pairs:
            # reading leaves no dirty lines, as writing would
            self.other.sum()
            # five milliseconds, in which the launches of a training step queue up
            torch.cuda._sleep(10_000_000)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def copy_bandwidth(self) -> float:
        size = 2**12 if self.smallest else 2**30
        x, y = (torch.zeros(size, dtype=torch.int8, device=self.device) for _ in range(2))
        return 2 * size / self.time(lambda: y.copy_(x)).median_s


def error(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest norm of an error over the norm."""
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(ours, exact, strict=True))


def measure(machine: Machine, entry: Row, bandwidth: float) -> dict[str, Any]:
    found: dict[str, Any] = {"name": entry.name, "shape": entry.shape, "bytes": entry.bytes}
    prepared = entry.prepare(machine.device)
    if prepared.exact is not None:
        found["error"] = error(prepared.results(), prepared.exact())
        if not found["error"] <= entry.bound:
            return found | {"wrong": f"the error is above {entry.bound}"}
    timing = machine.time(prepared.call)
    return found | timing._asdict() | {"share": entry.bytes / timing.median_s / bandwidth}


def show(section: str, found: dict[str, Any]) -> None:
    left = f"{section:13} {found['name']:42} {found['shape']:36}"
    if "wrong" in found:
        print(left, found["wrong"], found.get("error", ""), flush=True)
        return
    times = "–".join(f"{1e6 * found[key]:.1f}" for key in ("min_s", "max_s"))
    right = f"{100 * found['share']:6.1f} %" if found["bytes"] else 8 * " "
    right += f"  error {found['error']:.1e}" if "error" in found else ""
    print(f"{left} {1e6 * found['median_s']:10.1f} µs ({times}) {right}", flush=True)


def append(path: Path | None, found: dict[str, Any]) -> None:
    if path:
        with path.open("a") as file:
            file.write(json.dumps(found) + "\n")


def run_section(section: str, machine: Machine, path: Path | None) -> bool:
    """Return whether every row is right."""
    bandwidth = machine.copy_bandwidth()
    append(path, {"section": section, "copy_bandwidth": bandwidth})
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s", flush=True)
    failed = False
    for entry in SECTIONS[section](machine.smallest):
        try:
            found = measure(machine, entry, bandwidth)
        except Exception as failure:
            # a kernel that does not fit, or a package that has changed; after a fault the next row fails too
            found = {"name": entry.name, "shape": entry.shape, "wrong": f"{type(failure).__name__}: {failure}"[:300]}
        failed |= "wrong" in found
        append(path, {"section": section, **found})
        show(section, found)
    return not failed


def commands(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """The sections, and how to run each."""
    again = [sys.executable, __file__, *(["--smallest"] if options.smallest else [])]
    # in several processes if it can, as most of the time is Triton's compiler; a fault ends the tests of its process
    several = ["-n", str(min(12, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    pytest = [sys.executable, "-m", "pytest", "-q"]
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    for section in options.only.split(","):
        if section == "contenders" and importlib.util.find_spec("fla") is None:
            print("contenders: not timed, as flash-linear-attention is not installed")
        elif section in SECTIONS:
            path = ["--json", str(options.json)] if options.json else []
            yield section, [*again, "--section", section, *path, "--repeats", str(options.repeats)]
        elif section == "values":
            yield section, [*pytest, *several, str(LAWS / "test_tiles.py")]
        elif section == "laws":
            yield section, [*pytest, *several, str(LAWS)]
        elif section == "memory" and sanitizer:
            tests = [*pytest, "-x", str(LAWS / "test_tiles.py"), "-k", "64 or 128"]
            yield section, [sanitizer, "--error-exitcode", "9", *tests]
        else:
            print(f"{section}: not checked, as compute-sanitizer is not on this machine")


def run_all(options: argparse.Namespace) -> bool:
    """Return whether every section is right; none waits for another, and none ends another."""
    right = True
    for section, command in commands(options):
        start, failure = time.perf_counter(), None
        try:
            done = subprocess.run(command, timeout=LIMITS[section])
            failure = None if done.returncode == 0 else f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"took more than {LIMITS[section]} s"
        seconds = time.perf_counter() - start
        print(f"{section}: {failure or 'right'}, {seconds:.0f} s", flush=True)
        append(options.json, {"section": section, "seconds": seconds, "failure": failure})
        right &= failure is None
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append a line here after every row")
    every = [section for section in LIMITS if section != "contenders"]
    parser.add_argument("--only", default=",".join(every), help="of " + ", ".join(LIMITS))
    parser.add_argument("--contenders", action="store_true", help="also time flash-linear-attention, carried along")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--smallest", action="store_true", help="once, on tiny shapes")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, help="these, in this process")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(LIMITS)
    if unknown:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    if machine == "no GPU" and not options.smallest:
        parser.error("there is no GPU here; --smallest needs none")
    if options.section:
        here = Machine(options.smallest, options.repeats)
        sys.exit(not all([run_section(section, here, options.json) for section in options.section]))
    if options.contenders:
        options.only += ",contenders"
    print(f"{machine}, torch {torch.__version__}", flush=True)
    append(options.json, {"device": machine, "torch": torch.__version__})
    sys.exit(not run_all(options))


if __name__ == "__main__":
    main()
