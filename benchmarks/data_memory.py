"""The resident memory of the data of a run, for corpora of different sizes: while they are tokenized, and while windows
of them are read.

    python -m benchmarks.data_memory [--sizes 1 10] [--kind text] [--windows 32000] [--folder /tmp]

Each phase has a process of its own. Text files are sparse, so that they take no disk, but their tokens take two bytes
per byte; all is deleted at the end. "of its own" is the memory that the process has allocated; the rest are pages of
files, programs included, which the system may take back at any time."""

import argparse
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linattn.cli.vocabulary import load_vocabulary
from linattn.data.corpus import Choice, open_data, write_data
from linattn.data.windows import TrainingWindows

CONTEXT = 512
GIGABYTE = 10**9
DOCUMENT = 4000
"""Bytes per row."""


def make_text(folder: Path, size: int) -> Path:
    """Make a file of `size` bytes, with a sentence here and there."""
    path = folder / "corpus.txt"
    with open(path, "wb") as file:
        file.truncate(size)
        for place in range(0, size, 64 * 2**20):
            file.seek(place)
            file.write(b"A sentence of a corpus.\n")
    return path


def make_rows(folder: Path, size: int) -> Path:
    """Make a file of JSON lines with `size` bytes of text, in documents of different lengths."""
    path, draw = folder / "corpus.jsonl", random.Random(0)
    text = "".join(draw.choices("abcdefgh \n", k=2 * DOCUMENT))
    with open(path, "w") as file:
        while size > 0:
            length = draw.randrange(1, 2 * DOCUMENT)
            file.write(json.dumps({"text": text[:length]}) + "\n")
            size -= length
    return path


KINDS: dict[str, Callable[[Path, int], Path]] = {"text": make_text, "rows": make_rows}


def tokenize(path: Path, folder: Path) -> dict[str, Any]:
    parts = write_data(Choice(paths=[str(path)]), load_vocabulary(None), folder, context=CONTEXT)
    return {"parts": parts, **memory()}


def read(parts: Any, folder: Path, windows: int) -> dict[str, Any]:
    """Read windows as a training does, on one of its processes."""
    row = open_data(folder, "training", parts["training"], load_vocabulary(None).dtype)
    data, started = TrainingWindows(row, CONTEXT, seed=0, length=windows), time.perf_counter()
    for i in range(windows):
        data[i]
    return {"µs per window": 1e6 * (time.perf_counter() - started) / windows, **memory()}


def memory() -> dict[str, float]:
    """Return megabytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"peak": peak, "now": _megabytes(status["VmRSS"]), "of its own": _megabytes(status["RssAnon"])}


def _megabytes(field: str) -> float:
    return int(field.split()[0]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0, 10.0], help="gigabytes of text")
    parser.add_argument("--kind", choices=list(KINDS), default="text")
    parser.add_argument("--windows", type=int, default=32_000)
    parser.add_argument("--folder", help="where the data are while they are measured")
    options = parser.parse_args()
    print("| GB of text | phase | peak MB | MB at the end | of its own |\n|---:|---|---:|---:|---:|")
    for size in options.sizes:
        with (
            tempfile.TemporaryDirectory(dir=options.folder) as name,
            multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
        ):
            folder = Path(name)
            path = KINDS[options.kind](folder, int(size * GIGABYTE))
            (folder / "data").mkdir()
            written = pool.apply(tokenize, (path, folder / "data"))
            found = pool.apply(read, (written["parts"], folder / "data", options.windows))
            for phase, row in (("tokenize", written), (f"read {options.windows:,} windows", found)):
                print(
                    f"| {size:g} | {phase} | {row['peak']:.0f} | {row['now']:.0f} | {row['of its own']:.0f} |",
                    flush=True,
                )
            print(f"{found['µs per window']:.0f} µs per window", file=sys.stderr)


if __name__ == "__main__":
    main()
