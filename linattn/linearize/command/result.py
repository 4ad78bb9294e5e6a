"""The folder OUT of `linattn linearize`: the model comes first, with a record of its conversion, then the report."""

import argparse
import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from linattn.console.atomic import atomic_folder, write_atomically
from linattn.console.errors import CommandError, explained
from linattn.linearize.command.page import html
from linattn.linearize.command.text import decoded_samples
from linattn.linearize.probes import TURN, TURNS
from linattn.linearize.report import Probes, report
from linattn.linearize.scores import Scores

RECORD, REPORT, PAGE = "conversion.json", "report.json", "report.html"
TIMES = (1, 4, 16)
"""The lengths of the probes, as multiples of the context."""
PROMPTS, NEW_TOKENS = 8, 64
DATA = ("data", "validation_data")
FREE = ("command", "out", "save_every", "track", "report", "fsdp")
"""Options that may be others when a conversion resumes."""

Record = dict[str, Any]
"""The facts about a conversion, as JSON."""


def settings(arguments: argparse.Namespace) -> Record:
    """Return the options that a conversion depends on, as JSON. Files have absolute names."""
    options = {name: value for name, value in vars(arguments).items() if name not in FREE}
    options["model"] = _absolute(arguments.model)
    for name in DATA:
        options[name] = [_absolute(path) for path in options[name] or ()]
    return json.loads(json.dumps(options, default=str))


def _absolute(name: str) -> str:
    """Return the absolute path of a file; the name of a model or of data elsewhere stays."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def write_model(out: Path, model: PreTrainedModel, tokenizer: Any, record: Record) -> None:
    """Write the folder in one step: the model as transformers saves it, its tokenizer and the record."""
    record = {"command": shlex.join(["linattn", *sys.argv[1:]]), **record}
    # safetensors has errors of its own for a full disk
    with explained(f"{out} could not be written", SafetensorError), atomic_folder(out) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_record(out: Path) -> Record:
    """Read the record of the conversion that made the folder."""
    if not (path := out / RECORD).is_file():
        raise CommandError(f"{out} is not of `linattn linearize`: it has no {RECORD}")
    return read_json(path, "settings", "plan", "swapped_in", "losses", "validations", "reset", "seconds")


def read_json(path: Path, *fields: str) -> Record:
    """Read an object with these fields."""
    with explained(f"{path} is corrupt", ValueError):
        record = json.loads(path.read_bytes())
        if not isinstance(record, dict):
            raise ValueError("it holds no object")
        if missing := [name for name in fields if name not in record]:
            raise ValueError(f"it has no {', '.join(missing)}")
        return record


def write_report(
    out: Path,
    record: Record,
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    tokenizer: Any,
    text: Tensor,
    held_out: list[dict[str, Tensor]],
    *,
    seconds: float | None,
) -> None:
    """Measure the model in the folder, in about so many `seconds`, and write and print its report."""
    probes = language_probes(model.config, text, held_out) if model.can_generate() else None
    swapped_in, show = Scores(**record["swapped_in"]), partial(print, "report:", file=sys.stderr)
    found = report(model, teacher, held_out, probes, swapped_in=swapped_in, seconds=seconds, progress=show)
    facts = found.to_dict() | {name: value for name, value in record.items() if name != "swapped_in"}
    if record["reset"]:
        facts["sentences"].append("Training did not help, so the model has the weights before it.")
    facts["samples"] = decoded_samples(facts["generated"], tokenizer)
    # the page first: a folder with the figures has both
    write_atomically(out / PAGE, html(facts))
    write_atomically(out / REPORT, json.dumps(facts, indent=2) + "\n")
    print("\n".join(facts["sentences"]))
    for sample in facts["samples"][:1]:
        print("\n".join(f"{name + ':':<8} {json.dumps(text, ensure_ascii=False)}" for name, text in sample.items()))
    if found.left_out:
        print(f"{report_command(out)} measures everything", file=sys.stderr)
    print(f"{out} is complete: {out / PAGE} has the report", file=sys.stderr)


def report_command(out: Path) -> str:
    """Return the command that makes the report of a complete folder."""
    return shlex.join(["linattn", "linearize", "--report", str(out)])


def language_probes(config: PreTrainedConfig, text: Tensor, held_out: list[dict[str, Tensor]]) -> Probes:
    """Return the probes of a language model for the context that the `held_out` batches have."""
    context, limit = held_out[0]["input_ids"].shape[1], positions(config)
    lengths = [times * context for times in TIMES if times * context <= limit]
    return Probes(
        text=text,
        recall_lengths=[length for length in lengths if 64 <= length < len(text) - 64],
        prompts=held_out[0]["input_ids"][:PROMPTS, : context // 2],
        new_tokens=min(NEW_TOKENS, limit - context // 2),
        cost_lengths=[length for length in lengths if length + TURNS * TURN <= limit],
    )


def positions(config: PreTrainedConfig) -> int:
    """Return the largest number of tokens that the model takes."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
