"""`linattn bench`: measure time and memory of attention methods on this machine, beside each other."""

import argparse
from pathlib import Path

import torch

from linattn.cli.argument_types import COUNT, METHODS, POSITIVE, counts, names_from

SMALLER = "a lower --batch, --heads, --head-dim or --lengths"
SUMMARY = "measure speed and memory on this machine, and draw the report"
FORWARD, TRAINING, DECODING = WORKLOADS = ("forward", "training", "decoding")
SOFTMAX = "softmax"
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench"), metavar="FOLDER", help="for bench.json and report.html (./bench)")
    add("--methods", type=METHODS, metavar="A,B", help="names of attentions, or mixtures of them")
    add("--workloads", type=names_from(WORKLOADS), metavar="A,B", help=f"some of {', '.join(WORKLOADS)} (default: all)")
    add("--not-causal", dest="causal", action="store_false", help="let every query see all keys")
    add_conditions(parser)
    add = parser.add_argument_group("instead of measuring").add_mutually_exclusive_group().add_argument
    add("--compare", nargs=2, type=Path, metavar=("A", "B"), help="list what changed from A.json to B.json")
    add("--redraw", type=Path, metavar="A", help="write the tables and the report of A.json again")


def add_conditions(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks have in common."""
    add = parser.add_argument_group("conditions").add_argument
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    lengths = tuple(2**power for power in range(8, 17))
    add("--lengths", type=counts, default=lengths, metavar="N,N", help="tokens (default: 256 to 65536)")
    add("--dtypes", type=names_from(DTYPES), default="float32", metavar="A,B", help=f"some of {', '.join(DTYPES)}")
    add("--batch", default=1, **COUNT, help="number of sequences (default: 1)")
    add("--heads", default=8, **COUNT, help="number of heads (default: 8)")
    add("--head-dim", default=64, **COUNT, help="channels per head (default: 64)")
    add("--window", default=128, **COUNT, help="window of local attention (default: 128)")
    add("--device", choices=devices, default=devices[0], help=f"(default: {devices[0]})")
    add("--threads", default=torch.get_num_threads(), **COUNT, help="(default: as many as torch takes)")
    add("--repeats", default=7, **COUNT, help="rounds in which methods take turns (default: 7)")
    add("--budget", default=600.0, **POSITIVE, help="seconds; the longest sequences are left out first (default: 600)")
