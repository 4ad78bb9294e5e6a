"""Runs `linattn bench`: measures and reports, or compares or draws earlier measurements."""

import argparse
import math
import sys
from itertools import product
from tempfile import TemporaryFile
from typing import Any

import torch

from linattn.attention import traits
from linattn.cli.bench import DECODING, SMALLER, SOFTMAX, WORKLOADS
from linattn.cli.bench.attentions import build_attention, prepare
from linattn.cli.bench.compare import comparison
from linattn.cli.bench.measure import measure
from linattn.cli.bench.record import Case, Setup, read_record, write_record
from linattn.cli.bench.report import html, printed
from linattn.console.atomic import write_atomically
from linattn.console.errors import CommandError, explained
from linattn.console.memory import available_memory, require_memory

# without --methods, those that can be causal, or bidirectional
SELECTION = (SOFTMAX, "elu", "taylor", "efficient", "favor", "retention", "gated_delta", "linformer", "local")
SELECTION += ("local+elu",)


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        print(comparison(*map(read_record, arguments.compare)))
        return 0
    options = complete_options(arguments)
    with explained("choose another --out", OSError):
        arguments.out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=arguments.out).close()
    record = read_record(arguments.redraw) if arguments.redraw else measure(prepare, case_groups(options), options)
    # first of all, because on a full disk nothing else remains
    print(printed(record))
    write_record(record, arguments.out / "bench.json")
    write_atomically(arguments.out / "report.html", html(record))
    print(f"{arguments.out / 'report.html'} has the pictures", file=sys.stderr)
    return 0


def complete_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options for measuring, with the methods checked."""
    options = {name: x for name, x in vars(arguments).items() if name not in ("command", "out", "compare", "redraw")}
    options["workloads"] = options["workloads"] or WORKLOADS[: 3 if arguments.causal else 2]
    options["methods"] = options["methods"] or default_methods(arguments.causal)
    if not arguments.causal and DECODING in options["workloads"]:
        raise CommandError("decoding is causal, so it cannot be --not-causal")
    setup = Setup(**{name: options[name] for name in Setup.__annotations__})
    _require_memory(setup, options)
    for name in options["methods"]:
        with explained("--methods", ValueError):
            build_attention(setup, name, max(arguments.lengths))
    return options


def _require_memory(setup: Setup, options: dict[str, Any]) -> None:
    """Raise CommandError if not even the inputs of the shortest sequences fit. Longer ones are left out later."""
    n = min(options["lengths"])
    if DECODING in options["workloads"]:
        # what decoding reads before it is timed
        n = min(n, 2 * setup.window)
    shape = setup.batch, setup.heads, n, setup.head_dim
    size = 4 * math.prod(shape) * min(getattr(torch, name).itemsize for name in options["dtypes"])
    what = f"queries, keys, values and a gradient of {' × '.join(f'{x:,}' for x in shape)} numbers each"
    require_memory({what: size}, available_memory(cpu=setup.device == "cpu"), f"{SMALLER} needs less")


def default_methods(causal: bool) -> list[str]:
    """Return the methods of `SELECTION` that can be causal, or, if not `causal`, those that can be bidirectional."""
    return [name for name in SELECTION if (traits(name).causal if causal else traits(name).bidirectional)]


def case_groups(options: dict[str, Any]) -> list[list[Case]]:
    """Return groups of cases that differ in their methods only, short sequences first."""
    groups = product(options["lengths"], options["workloads"], options["dtypes"])
    return [[Case(work, name, dtype, n) for name in options["methods"]] for n, work, dtype in groups]
