"""Runs `linattn bench`: measures, compares, or draws again."""

import argparse
import shlex
import sys
import time
from typing import Any

import torch
from tqdm.auto import tqdm

from linattn.attention.named import ATTENTIONS
from linattn.cli.atomic import write_atomically
from linattn.cli.bench import add_arguments
from linattn.cli.bench.cases import DECODING, MODEL_WORKLOADS, WORKLOADS, Setup
from linattn.cli.bench.compare import compared
from linattn.cli.bench.features import layers_of_run, layers_of_training, measure_features
from linattn.cli.bench.measuring import Measuring, plan
from linattn.cli.bench.peers import PEERS, installed
from linattn.cli.bench.record import Measurement, Record, describe_machine, read_record, write_record
from linattn.cli.bench.report import html, printed
from linattn.cli.errors import CommandError, did_you_mean, explained

LENGTHS = tuple(2**power for power in range(8, 17))
CAUSAL = ("softmax", "elu", "taylor", "efficient", "favor", "retention", "local", "local+elu")
NOT_CAUSAL = ("softmax", "elu", "taylor", "efficient", "favor", "linformer", "local")
DTYPES = ("float32", "bfloat16", "float16")
# shares of the budget, and the most seconds: training the small model, all feature maps' errors, drawing
TRAINING_SHARE, TRAINING_MOST, FEATURES_SHARE, REPORT_SHARE, REPORT_MOST = 0.1, 60.0, 0.2, 0.1, 10.0


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        print(compared(*map(read_record, arguments.compare)))
        return 0
    record = read_record(arguments.redraw) if arguments.redraw else measure(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.redraw:
        write_record(record, arguments.out / "bench.json")
    write_atomically(arguments.out / "report.html", html(record))
    print(printed(record))
    print(f"{arguments.out / 'report.html'} has the pictures", file=sys.stderr)
    return 0


def measure(arguments: argparse.Namespace) -> Record:
    started, setup, asked = time.monotonic(), _setup(arguments), _asked(arguments)
    machine = describe_machine(setup.device, setup.threads)
    torch.set_num_threads(setup.threads)
    notes, errors = ((), []) if arguments.no_features else _features(arguments, started)
    budget = arguments.budget - min(REPORT_MOST, REPORT_SHARE * arguments.budget)
    measuring = Measuring(setup, plan(**asked), arguments.repeats, started + budget)
    with tqdm(measuring.groups, dynamic_ncols=True, disable=None, leave=False, unit="group") as bar:
        for place, group in enumerate(bar):
            bar.set_description_str(f"{group[0].workload}, {group[0].dtype}, n = {group[0].n:,}")
            measuring.measure(place)
    sizes = {name: getattr(arguments, name) for name in ("batch", "heads", "head_dim", "window", "repeats", "budget")}
    return Record(
        command=command_line(arguments),
        machine=machine,
        options=asked | sizes | {"causal": setup.causal},
        measurements=(*measuring.measurements, *errors),
        dropped=tuple(measuring.dropped),
        seconds=round(time.monotonic() - started, 1),
        notes=notes,
    )


def _setup(arguments: argparse.Namespace) -> Setup:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError("torch finds no CUDA device here: --device cpu")
    sizes = {name: getattr(arguments, name) for name in ("batch", "heads", "head_dim", "window")}
    threads = arguments.threads or torch.get_num_threads()
    return Setup(causal=not arguments.not_causal, device=device, threads=threads, **sizes)


def _asked(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the names and lengths that `plan` takes."""
    causal = not arguments.not_causal
    workloads, dtypes = arguments.workloads or WORKLOADS, arguments.dtypes or DTYPES[:1]
    for option, names, known in (("--workloads", workloads, WORKLOADS), ("--dtypes", dtypes, DTYPES)):
        if unknown := [name for name in names if name not in known]:
            nearest = did_you_mean(unknown[0], known)
            raise CommandError(f"{option} are of {', '.join(known)}, but there is {unknown[0]!r}{nearest}")
    if not causal and (arguments.models or DECODING in (arguments.workloads or ())):
        raise CommandError("decoding and --models are causal, so they cannot be --not-causal")
    workloads = [name for name in workloads if causal or name != DECODING]
    methods = list(arguments.methods or (CAUSAL if causal else NOT_CAUSAL))
    for name in methods:
        if name not in PEERS and any(part.partition(":")[0] not in ATTENTIONS for part in name.split("+")):
            nearest = did_you_mean(name, (*ATTENTIONS, *CAUSAL, *PEERS))
            raise CommandError(
                f"{name!r} is no attention: docs/methods.md has their names, and peers are {[*PEERS]}{nearest}"
            )
    for peer in installed(causal) if arguments.peers else ():
        methods += [PEERS[peer].counterpart[causal], peer]
    return {
        "workloads": [*workloads, *(MODEL_WORKLOADS if arguments.models else ())],
        "methods": list(dict.fromkeys(methods)),
        "dtypes": list(dtypes),
        "lengths": list(arguments.lengths or LENGTHS),
    }


def _features(arguments: argparse.Namespace, started: float) -> tuple[tuple[str, ...], list[Measurement]]:
    print("real queries and keys for the feature maps …", file=sys.stderr)
    with explained("no queries and keys", OSError):
        if arguments.model is not None:
            layers, source = layers_of_run(arguments.model, arguments.text)
        else:
            seconds = min(TRAINING_MOST, TRAINING_SHARE * arguments.budget)
            layers, source = layers_of_training(arguments.text, seconds)
    return (source,), list(measure_features(layers, started + FEATURES_SHARE * arguments.budget))


def command_line(arguments: argparse.Namespace) -> str:
    """Rebuild the command that was given from what differs from the defaults."""
    parser, words = argparse.ArgumentParser(), ["linattn", "bench"]
    add_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(arguments, name)
        if value != default:
            words.append("--" + name.replace("_", "-"))
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value).removesuffix(".0")
            words += [] if value is True else [text]
    return shlex.join(words)
