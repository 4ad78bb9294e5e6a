"""`linattn bench`: every method beside softmax and other packages, on this machine."""

import argparse
from pathlib import Path
from typing import Any

from linattn.cli.values import FLAG, POSITIVE, WHOLE, listed, one_of, whole_from

SUMMARY = "measure speed and memory on this machine, and draw the report"
LENGTHS = tuple(2**power for power in range(8, 17))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is not given is None or False, so that the command can be told again from what was."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench"), metavar="FOLDER", help="for bench.json and report.html (./bench)")
    add("--budget", default=600.0, **POSITIVE, help="seconds; the longest sequences are left out first (default: 600)")
    what = parser.add_argument_group("what is measured")
    what.add_argument("--methods", type=listed, metavar="A,B", help="names of attentions, or mixtures of them")
    what.add_argument("--peers", **FLAG, help="other packages too, those that are installed")
    what.add_argument("--models", **FLAG, help="whole language models too: training, prompts, generation")
    what.add_argument("--works", type=listed, metavar="A,B", help="of forward, training, decoding")
    what.add_argument("--lengths", type=_lengths, metavar="N,N", help="(default: 256 to 65536)")
    what.add_argument("--dtypes", type=listed, metavar="A,B", help="float32, bfloat16, float16 (default: float32)")
    what.add_argument("--not-causal", **FLAG, help="every query sees all keys")
    _add_sizes(parser)
    features = parser.add_argument_group("queries and keys for the feature maps' errors")
    features.add_argument("--model", type=Path, metavar="RUN", help="of linattn train, instead of a small one made now")
    features.add_argument("--text", type=Path, metavar="FILE", help="to read, instead of Python's standard library")
    features.add_argument("--no-features", **FLAG, help="leave these errors out")
    files = parser.add_argument_group("instead of measuring")
    files.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="what changed from A.json to B.json")
    files.add_argument("--redraw", type=Path, metavar="A", help="table and report of A.json once more")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how")
    how.add_argument("--repeats", default=7, **WHOLE, help="rounds in which contenders take turns (default: 7)")
    how.add_argument("--threads", **WHOLE, help="(default: what torch takes)")
    how.add_argument("--device", **one_of("cpu", "cuda"), help="(default: cuda where there is one)")
    how.add_argument("--batch", default=1, **WHOLE, help="sequences (default: 1)")
    how.add_argument("--heads", default=8, **WHOLE, help="(default: 8)")
    how.add_argument("--head-dim", default=64, **WHOLE, help="channels of a head (default: 64)")
    how.add_argument("--window", default=128, **WHOLE, help="of local attention (default: 128)")


def _lengths(text: str) -> tuple[int, ...]:
    whole: Any = whole_from(1)
    return tuple(sorted({whole(part) for part in text.split(",")}))


def run(arguments: argparse.Namespace) -> int:
    # imported here, because it takes seconds and mistakes in the options should be told at once
    from linattn.cli.bench import command

    return command.run(arguments)
