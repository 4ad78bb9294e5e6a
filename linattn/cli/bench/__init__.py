"""`linattn bench`: every method beside softmax and other packages, on this machine."""

import argparse
from pathlib import Path

from linattn.cli.argument_types import COUNT, FLAG, POSITIVE, comma_separated, integer_from

SUMMARY = "measure speed and memory on this machine, and draw the report"
FORWARD, TRAINING, DECODING = WORKLOADS = ("forward", "training", "decoding")
MODEL_TRAINING, MODEL_PREFILL, MODEL_DECODING = MODEL_WORKLOADS = ("model training", "model prefill", "model decoding")
ONE_TOKEN = (DECODING, MODEL_DECODING)
WITH_FEATURES = "feature maps"
SOFTMAX, UNIFORM, RATE = "softmax", "uniform attention", "batched 64³ products"
DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = tuple(2**power for power in range(8, 17))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench"), metavar="FOLDER", help="for bench.json and report.html (./bench)")
    add("--budget", default=600.0, **POSITIVE, help="seconds; the longest sequences are left out first (default: 600)")
    add = parser.add_argument_group("what is measured").add_argument
    add("--methods", type=comma_separated, metavar="A,B", help="names of attentions, or mixtures of them")
    add("--peers", **FLAG, help="measure the other packages that are installed, too")
    add("--models", **FLAG, help="measure complete language models, too: training, prompts, generation")
    add("--workloads", type=comma_separated, metavar="A,B", help="some of forward, training, decoding")
    add("--lengths", type=_lengths, default=LENGTHS, metavar="N,N", help="(default: 256 to 65536)")
    dtypes = f"some of {', '.join(DTYPES)} (default: float32)"
    add("--dtypes", type=comma_separated, default=("float32",), metavar="A,B", help=dtypes)
    add("--not-causal", dest="causal", action="store_false", help="let every query see all keys")
    add = parser.add_argument_group("how").add_argument
    add("--repeats", default=7, **COUNT, help="rounds in which methods take turns (default: 7)")
    add("--threads", **COUNT, help="(default: as many as torch takes)")
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one)")
    add("--batch", default=1, **COUNT, help="number of sequences (default: 1)")
    add("--heads", default=8, **COUNT, help="number of heads (default: 8)")
    add("--head-dim", default=64, **COUNT, help="channels per head (default: 64)")
    add("--window", default=128, **COUNT, help="window of local attention (default: 128)")
    add = parser.add_argument_group("queries and keys for the feature maps' errors").add_argument
    add("--model", type=Path, metavar="RUN", help="folder of linattn train, instead of a small model trained now")
    add("--text", type=Path, metavar="FILE", help="text to read, instead of Python's standard library")
    add("--no-features", **FLAG, help="leave these errors out")
    add = parser.add_argument_group("instead of measuring").add_mutually_exclusive_group().add_argument
    add("--compare", nargs=2, type=Path, metavar=("A", "B"), help="say what changed from A.json to B.json")
    add("--redraw", type=Path, metavar="A", help="write the tables and the report of A.json again")


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(sorted({integer_from(1)(part) for part in text.split(",")}))
