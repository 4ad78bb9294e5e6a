"""`linattn linearize`: turn a pretrained softmax model of transformers into a linear one, and report on it.

The result is a folder that from_pretrained loads. Run the same command again after an interruption: it goes on. Of the
processes that torchrun starts, each reads --batch sequences at a time, and an update takes those of all."""

import argparse
from fractions import Fraction
from pathlib import Path

from linattn.cli.argument_types import COUNT, FLAG, METHOD, NATURAL, POSITIVE, SEED, integers, repeatable
from linattn.console.errors import CommandError
from linattn.console.trackers import HELP as TRACKERS
from linattn.data.sources import DATA_HELP

SMALLER = "a lower --batch or --context, --dtype bfloat16, --checkpointing, or --lora,"
SUMMARY = "turn a pretrained softmax model into a linear one"
DEFAULT, WINDOW = "taylor2", 32
NEEDED = {"model": "MODEL", "data": "--data", "out": "--out"}
OF_REPORT = ("command", "report", "model", "data", "validation_data", "cpu")
"""Options that --report takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or name of a model of transformers")
    add("--data", nargs="+", metavar="DATA", help=f"text like its own: {DATA_HELP}")
    add("--out", type=Path, metavar="OUT", help="the folder of the linear model and the report")
    add(
        "--report",
        type=Path,
        metavar="OUT",
        help="measure the model in OUT again, with all probes, and write its report; MODEL, --data and "
        "--validation-data say where its teacher and data are now",
    )
    add = parser.add_argument_group("what it becomes").add_argument
    shown = f"an attention, or a mixture of them (default: {DEFAULT})"
    add("--method", type=METHOD, default=DEFAULT, metavar="METHOD", help=shown)
    add(
        "--keep",
        type=layer_choice,
        default=(),
        metavar="LAYERS",
        help="layers that stay softmax: a share such as 1/4, then chosen; numbers such as 0,5; or none (default: none)",
    )
    add(
        "--window",
        default=WINDOW,
        **NATURAL,
        help=f"tokens that local heads see, or a softmax beside linear attention; 0: none (default: {WINDOW})",
    )
    add("--convolution", default=4, **NATURAL, help="width of the short convolution, 0: none (default: 4)")
    add = parser.add_argument_group("data").add_argument
    add("--include", **repeatable("NAME"), help="in folders, take only files with such names, e.g. '*.py'; repeatable")
    add("--exclude", **repeatable("NAME"), help="in folders, leave out files and folders with such names; repeatable")
    add("--field", default="text", metavar="FIELD", help="of documents in rows, the field of the text (default: text)")
    add("--validation-data", **repeatable("DATA"), help="data for the report, not the last 5 %% of --data; repeatable")
    add = parser.add_argument_group("training").add_argument
    add("--minutes", **POSITIVE, help="training time (default: 10)")
    add("--steps", **COUNT, help="updates of the weights, instead of --minutes")
    add("--context", **integers(2), help="tokens per sequence (default: 512, or as many as the model takes)")
    add("--batch", default=8, **COUNT, help="sequences per batch (default: 8)")
    add(
        "--lr",
        **POSITIVE,
        help="learning rate of fine-tuning, new weights have 2.5 times that (default: by the distance to the teacher)",
    )
    add("--lora", **COUNT, help="train adapters of this rank and the new weights, instead of all weights")
    add("--accumulate", default=1, **COUNT, help="batches per update (default: 1)")
    add(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of the weights that do not train, of the teacher, of matrix products and of OUT; what trains is float32 "
        "(default: float32)",
    )
    add("--checkpointing", **FLAG, help="recompute activations in the backward pass, to save memory")
    add(
        "--fsdp", **FLAG, help="with several processes, which torchrun starts, each holds a part of what trains (FSDP2)"
    )
    add("--seed", default=0, **SEED, help="seed of the order of the data and of new weights (default: 0)")
    add("--save-every", default=100, **COUNT, help="updates from one checkpoint to the next (default: 100)")
    add("--track", **repeatable("TRACKER"), help=TRACKERS)
    add("--cpu", **FLAG, help="do not use a GPU")


def run(arguments: argparse.Namespace) -> int:
    if arguments.report is None:
        if missing := [shown for name, shown in NEEDED.items() if not getattr(arguments, name)]:
            raise CommandError(f"{', '.join(missing)} must be given, or --report OUT")
    elif others := _others(arguments):
        raise CommandError(f"--report measures a model that is complete, without {', '.join(others)}")
    # this takes seconds to import, so mistakes in the options are reported before
    from linattn.linearize.command import run

    return run.run(arguments)


def _others(arguments: argparse.Namespace) -> list[str]:
    """Return the options, beside those that --report takes, that are not at their defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    values = vars(arguments).items()
    return [
        f"--{name.replace('_', '-')}"
        for name, value in values
        if name not in OF_REPORT and value != parser.get_default(name)
    ]


def layer_choice(text: str) -> Fraction | tuple[int, ...]:
    """Read a share of the layers, or their numbers."""
    try:
        if text == "none":
            return ()
        if "/" in text and 0 < (share := Fraction(text)) < 1:
            return share
        return tuple(sorted({int(part) for part in text.split(",")}))
    except (ValueError, ZeroDivisionError):
        pass
    raise argparse.ArgumentTypeError(f"must be a share such as 1/4, numbers such as 0,5, or none, but is {text!r}")
