"""`linattn info`: describe a run, a model of transformers, or a state in a file."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from linattn.cli.run_folder import Description, Run, is_pretrained, open_run
from linattn.console.errors import explained
from linattn.models import LanguageModel
from linattn.models.storage import CONFIG
from linattn.states.rows import num_bytes

SMALLER = "a smaller model"
SUMMARY = "describe a run, a model of transformers, or a state in a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="RUN",
        help="the folder that linattn train or linearize wrote, or the file of a state",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    path = arguments.path
    if path.is_file():
        from linattn.states import describe_state

        with explained("the state cannot be described", ValueError):
            facts = {"file": str(path), "file_bytes": path.stat().st_size, **describe_state(path)._asdict()}
        lines = _state_lines(facts)
    elif is_pretrained(path):
        # this takes seconds to import
        from linattn.cli.pretrained import describe

        facts = describe(path)
        lines = _pretrained_lines(facts)
    else:
        facts = gather(open_run(path))
        lines = _lines(facts)
    text = (f"{name:<12} {fact}" for name, fact in lines)
    print(json.dumps(facts, indent=2) if arguments.json else "\n".join(text))
    return 0


def gather(run: Run) -> dict[str, Any]:
    return {
        "run": str(run.folder),
        **{name: run.description[name] for name in Description.__annotations__ if name in run.description},
        "checkpoints": run.saved_steps(),
        "progress": _progress(list(run.records())),
        "model": _model(run.model()) if (run.folder / CONFIG).exists() else None,
    }


def _progress(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last value of each logged quantity, and the best validation."""
    last = {name: value for record in records for name, value in record.items()}
    bits = {record["step"]: record[name] for record in records if (name := "validation_bits_per_byte") in record}
    if bits:
        best = min(bits, key=bits.__getitem__)
        last |= {"best_validation_bits_per_byte": bits[best], "best_step": best}
    return last


def _model(model: LanguageModel) -> dict[str, Any]:
    """Describe the model, with the bytes of state per sequence, measured with every window full, and the bytes that
    each further token adds: none, unless softmax attends to all the past."""
    full = model.config.max_length or 2 * model.config.window
    tokens = torch.zeros(1, full, dtype=torch.long)
    with torch.inference_mode():
        _, state = model.extend_hidden(tokens)
        # learned positions end, and then nothing can grow any more
        _, longer = (None, state) if model.config.max_length else model.extend_hidden(tokens, state)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "configuration": model.config.to_dict(),
        "state_bytes": num_bytes(state),
        "state_bytes_per_further_token": (num_bytes(longer) - num_bytes(state)) / full,
    }


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    ending = f"complete {facts['finished']}" if facts["finished"] else "not complete"
    yield "run", f"{facts['run']}, begun {facts['created']}, {ending}"
    yield "made with", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    yield "processes", facts["processes"]
    for name, part in facts["data"].items():
        count = f"{part['documents']:,} document{'s' * (part['documents'] > 1)}"
        yield name, f"{part['bytes']:,} bytes in {count}, {part['tokens']:,} tokens"
    yield "data", " ".join(facts["paths"])
    yield "tokens", f"{facts['tokenizer'] or 'bytes'}, {facts['vocabulary']:,} kinds"
    if model := facts["model"]:
        yield "parameters", f"{model['parameters']:,}"
        yield "model", _settings(model["configuration"])
        yield "state", f"{model['state_bytes']:,} bytes per sequence{_growth(model)}"
    yield "training", _settings(facts["options"])
    yield "progress", ", ".join(_progress_texts(facts["progress"])) or "none yet"
    yield "checkpoints", ", ".join(map(str, facts["checkpoints"])) or "none"


def _pretrained_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "folder", facts["folder"]
    yield "class", facts["class"]
    yield "parameters", f"{facts['parameters']:,}"
    for kind in sorted(set(facts["layers"])):
        yield "layers", f"{kind}: {' '.join(str(i) for i, each in enumerate(facts['layers']) if each == kind)}"
    yield "state", f"{facts['state_bytes']:,} bytes per sequence after {facts['state_tokens']} tokens{_growth(facts)}"


def _state_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    read = "" if facts["num_tokens"] is None else f" after {facts['num_tokens']:,} tokens"
    yield (
        "state",
        f"{facts['file']}, {facts['file_bytes']:,} bytes, {facts['rows']} row{'s' * (facts['rows'] > 1)}{read}",
    )
    yield "made with", f"linattn {facts['linattn_version']}"
    if facts["model"]:
        yield "of a", f"{facts['model']} with weights of SHA-256 {facts['weights']}"
    if facts["config"]:
        yield "model", _settings(facts["config"])
    if facts["notes"]:
        yield "notes", _settings(facts["notes"])


def _growth(facts: dict[str, Any]) -> str:
    growth = facts["state_bytes_per_further_token"]
    return f", and {growth:,.0f} more for each further token" if growth else ", however long it gets"


def _settings(values: dict[str, Any]) -> str:
    """Return the settings as text, without those that are None, False, 0 or empty."""
    shown = {name: " ".join(map(str, x)) if isinstance(x, list) else x for name, x in values.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value not in (None, False, ""))


def _progress_texts(progress: dict[str, Any]) -> Iterator[str]:
    if progress:
        yield f"step {progress['step']:,}, {progress['tokens']:,} tokens, {progress['seconds']:,.0f} s"
    for part in ("training", "validation"):
        if (name := f"{part}_bits_per_byte") in progress:
            yield f"{part} {progress[name]:.3f} bits/byte"
    if "best_step" in progress:
        yield f"best {progress['best_validation_bits_per_byte']:.3f} at step {progress['best_step']:,}"
