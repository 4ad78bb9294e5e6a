"""What `linattn bench` does with its options: measure, or compare, or draw again."""

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from linattn.attention.named import ATTENTIONS
from linattn.cli.bench import LENGTHS, add_arguments
from linattn.cli.bench.cells import DECODING, MODEL_WORKS, WORKS, Setup, is_method
from linattn.cli.bench.compare import compared
from linattn.cli.bench.features import measure_features
from linattn.cli.bench.measuring import Measuring
from linattn.cli.bench.peers import PEERS, installed
from linattn.cli.bench.plan import plan
from linattn.cli.bench.real_text import Sample, sample_of_run, sample_of_training
from linattn.cli.bench.record import Measurement, Record, describe_machine, read_record, write_record
from linattn.cli.bench.report import html
from linattn.cli.bench.text import printed
from linattn.cli.errors import CommandError, did_you_mean, explained
from linattn.cli.whole import write_whole

CAUSAL = ("softmax", "elu", "taylor", "efficient", "favor", "retention", "local", "local+elu")
NOT_CAUSAL = ("softmax", "elu", "taylor", "efficient", "favor", "linformer", "local")
DTYPES = ("float32", "bfloat16", "float16")
TRAINING_SHARE, TRAINING_MOST, FEATURES_SHARE = 0.1, 60.0, 0.2
"""Of the budget: the small model's training, and with it all of the feature maps' errors."""
REPORT_SHARE, REPORT_MOST = 0.1, 10.0
"""Kept for drawing."""


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        print(compared(*map(read_record, arguments.compare)))
        return 0
    record = read_record(arguments.redraw) if arguments.redraw else measure(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.redraw:
        write_record(record, arguments.out / "bench.json")
    write_whole(arguments.out / "report.html", html(record))
    print(printed(record))
    print(f"{arguments.out / 'report.html'} has the pictures", file=sys.stderr)
    return 0


def measure(arguments: argparse.Namespace) -> Record:
    started = time.monotonic()
    setup, (works, methods, dtypes) = _setup(arguments), _names(arguments)
    lengths = arguments.lengths or LENGTHS
    groups = plan(works, methods, dtypes, lengths, causal=setup.causal)
    machine = describe_machine(setup.device, setup.threads)
    torch.set_num_threads(setup.threads)
    notes, measured = _features(arguments, setup, started)
    budget = arguments.budget - min(REPORT_MOST, REPORT_SHARE * arguments.budget)
    with tqdm(total=len(groups), dynamic_ncols=True, disable=None, leave=False, unit="group") as bar:
        measuring = Measuring(
            setup,
            groups,
            repeats=arguments.repeats,
            seconds=budget - (time.monotonic() - started),
            say=bar.set_description_str,
        )
        for _ in measuring.run():
            bar.update()
    return Record(
        command=command_line(arguments),
        machine=machine,
        options=_recorded(arguments, setup, works, methods, dtypes, lengths),
        measurements=(*measuring.measurements, *measured),
        dropped=tuple(measuring.dropped),
        seconds=round(time.monotonic() - started, 1),
        notes=notes,
    )


def _setup(arguments: argparse.Namespace) -> Setup:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError("torch finds no CUDA device here: --device cpu")
    return Setup(
        batch=arguments.batch,
        heads=arguments.heads,
        head_dim=arguments.head_dim,
        window=arguments.window,
        causal=not arguments.not_causal,
        device=device,
        threads=arguments.threads or torch.get_num_threads(),
    )


def _names(arguments: argparse.Namespace) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Works, methods and dtypes."""
    causal = not arguments.not_causal
    works, dtypes = arguments.works or WORKS, arguments.dtypes or DTYPES[:1]
    for option, names, known in (("--works", works, WORKS), ("--dtypes", dtypes, DTYPES)):
        if unknown := [name for name in names if name not in known]:
            nearest = did_you_mean(unknown[0], known)
            raise CommandError(f"{option} are of {', '.join(known)}, but there is {unknown[0]!r}{nearest}")
    if not causal:
        if arguments.models or (arguments.works and DECODING in works):
            raise CommandError("decoding and --models are causal, so they cannot be --not-causal")
        works = [work for work in works if work != DECODING]
    methods = list(arguments.methods or (CAUSAL if causal else NOT_CAUSAL))
    if unknown := [name for name in methods if not is_method(name)]:
        nearest = did_you_mean(unknown[0], (*ATTENTIONS, *CAUSAL, *PEERS))
        raise CommandError(
            f"{unknown[0]!r} is no attention: docs/index.md has their names, and peers are {[*PEERS]}{nearest}"
        )
    if arguments.peers:
        methods += [name for peer in installed(causal) for name in (PEERS[peer].like[causal], peer)]
        methods = list(dict.fromkeys(methods))
    return [*works, *(MODEL_WORKS if arguments.models else ())], methods, dtypes


def _features(arguments: argparse.Namespace, setup: Setup, started: float) -> tuple[tuple[str, ...], list[Measurement]]:
    if arguments.no_features:
        return (), []
    print("real queries and keys for the feature maps …", file=sys.stderr)
    with explained("no queries and keys", OSError):
        sample = _sample(arguments)
    deadline = started + FEATURES_SHARE * arguments.budget
    return (sample.source,), list(measure_features(sample, deadline))


def _sample(arguments: argparse.Namespace) -> Sample:
    if arguments.model is not None:
        return sample_of_run(arguments.model, arguments.text)
    return sample_of_training(arguments.text, min(TRAINING_MOST, TRAINING_SHARE * arguments.budget))


def command_line(arguments: argparse.Namespace) -> str:
    """The command that was given, from what differs from the defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults, words = vars(parser.parse_args([])), ["linattn", "bench"]
    for name, default in defaults.items():
        value = getattr(arguments, name)
        if value == default:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(_word(value))
    return shlex.join(words)


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _recorded(
    arguments: argparse.Namespace,
    setup: Setup,
    works: Sequence[str],
    methods: Sequence[str],
    dtypes: Sequence[str],
    lengths: Sequence[int],
) -> dict[str, Any]:
    names = {"works": list(works), "methods": list(methods), "dtypes": list(dtypes), "lengths": list(lengths)}
    sizes = {name: getattr(setup, name) for name in ("batch", "heads", "head_dim", "window", "causal")}
    return names | sizes | {"repeats": arguments.repeats, "budget": arguments.budget}
