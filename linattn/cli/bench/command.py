"""Runs `linattn bench`: measures, compares, or draws again."""

import argparse
import dataclasses
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from linattn.attention import ATTENTIONS, traits
from linattn.attention.named import SYNONYMS
from linattn.cli.atomic import write_atomically
from linattn.cli.bench import DECODING, DTYPES, FORWARD, MODEL_WORKLOADS, TRAINING, WORKLOADS
from linattn.cli.bench.compare import compared
from linattn.cli.bench.features import layers_of_run, layers_of_training, measure_features
from linattn.cli.bench.measure import Measuring, plan
from linattn.cli.bench.page import html
from linattn.cli.bench.peers import PEERS, installed
from linattn.cli.bench.record import Measurement, Record, Setup, describe_machine, read_record, write_record
from linattn.cli.bench.report import printed
from linattn.cli.errors import CommandError, explained
from linattn.names import did_you_mean

# without --methods, those that can be causal, or bidirectional
SELECTION = ("softmax", "elu", "taylor", "efficient", "favor", "retention", "gated_delta", "linformer", "local")
SELECTION += ("local+elu",)
CASES, SIZES = ("workloads", "methods", "dtypes", "lengths"), tuple(each.name for each in dataclasses.fields(Setup))
# shares of the budget, and the most seconds: training the small model, all feature maps' errors, drawing
TRAINING_SHARE, TRAINING_MOST, FEATURES_SHARE, REPORT_SHARE, REPORT_MOST = 0.1, 60.0, 0.2, 0.1, 10.0


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        print(compared(*map(read_record, arguments.compare)))
        return 0
    _require_writable(arguments.out)
    record = read_record(arguments.redraw) if arguments.redraw else measure(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.redraw:
        write_record(record, arguments.out / "bench.json")
    write_atomically(arguments.out / "report.html", html(record))
    print(printed(record))
    print(f"{arguments.out / 'report.html'} has the pictures", file=sys.stderr)
    return 0


def default_methods(causal: bool) -> list[str]:
    return [name for name in SELECTION if (traits(name).causal if causal else traits(name).bidirectional)]


def _require_writable(folder: Path) -> None:
    """Raise, before minutes of work, unless the folder is there or can be made."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise CommandError(f"{there} is no folder that can be written to: choose another --out")


def measure(arguments: argparse.Namespace) -> Record:
    started, options = time.monotonic(), _complete(arguments)
    setup = Setup(**{name: options[name] for name in SIZES})
    machine = describe_machine(setup.device, setup.threads)
    torch.set_num_threads(setup.threads)
    notes, errors = ((), []) if arguments.no_features else _features(arguments, started)
    budget = arguments.budget - min(REPORT_MOST, REPORT_SHARE * arguments.budget)
    measuring = Measuring(setup, arguments.repeats, started + budget)
    groups = plan(**{name: options[name] for name in CASES})
    with tqdm(groups, dynamic_ncols=True, disable=None, leave=False, unit="group") as bar:
        for group in bar:
            bar.set_description_str(f"{group[0].workload}, {group[0].dtype}, n = {group[0].n:,}")
            measuring.measure(group)
    return Record(
        command=shlex.join(["linattn", *sys.argv[1:]]),
        machine=machine,
        options={name: options[name] for name in (*CASES, *SIZES, "repeats", "budget")},
        measurements=(*measuring.measurements, *errors),
        dropped=tuple(measuring.dropped),
        seconds=round(time.monotonic() - started, 1),
        notes=notes,
    )


def _complete(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all options, also those whose defaults depend on the machine and on other options, with names checked."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError("torch finds no CUDA device here: --device cpu")
    workloads = list(arguments.workloads or (WORKLOADS if arguments.causal else (FORWARD, TRAINING)))
    for option, names, known in (("--workloads", workloads, WORKLOADS), ("--dtypes", arguments.dtypes, DTYPES)):
        if unknown := [name for name in names if name not in known]:
            nearest = did_you_mean(unknown[0], known)
            raise CommandError(f"{option} are of {', '.join(known)}, but there is {unknown[0]!r}{nearest}")
    if not arguments.causal and (arguments.models or DECODING in workloads):
        raise CommandError("decoding and --models are causal, so they cannot be --not-causal")
    methods = arguments.methods or default_methods(arguments.causal)
    for name in methods:
        if name not in PEERS and any(part.partition(":")[0] not in ATTENTIONS for part in name.split("+")):
            nearest = did_you_mean(name, (*ATTENTIONS, *PEERS), SYNONYMS)
            raise CommandError(
                f"{name!r} is no attention: docs/methods.md has their names, and peers are {', '.join(PEERS)}{nearest}"
            )
    for peer in installed(arguments.causal) if arguments.peers else ():
        methods += [PEERS[peer].counterpart[arguments.causal], peer]
    return vars(arguments) | {
        "device": device,
        "threads": arguments.threads or torch.get_num_threads(),
        "workloads": workloads + list(MODEL_WORKLOADS) * arguments.models,
        "methods": list(dict.fromkeys(methods)),
    }


def _features(arguments: argparse.Namespace, started: float) -> tuple[tuple[str, ...], list[Measurement]]:
    print("real queries and keys for the feature maps …", file=sys.stderr)
    seconds = min(TRAINING_MOST, TRAINING_SHARE * arguments.budget)
    with explained("no queries and keys", OSError):
        run, text = arguments.model, arguments.text
        layers, source = layers_of_run(run, text) if run else layers_of_training(text, seconds)
    return (source,), list(measure_features(layers, started + FEATURES_SHARE * arguments.budget))
