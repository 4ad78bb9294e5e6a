"""`linattn info`: describe a run."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.attention.states import map_state
from linattn.cli.run_folder import Run, load_model, open_run, read_log
from linattn.models import LanguageModel

SUMMARY = "describe a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder that linattn train wrote")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    facts = gather(open_run(arguments.folder))
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_lines(facts)))
    return 0


def gather(run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {"run": str(run.folder)}
    facts |= {
        name: run.description[name] for name in ("created", "finished", "paths", "data", "tokenizer", "vocabulary")
    }
    facts |= {name: run.description[name] for name in ("options", "processes", "versions")}
    facts["checkpoints"] = run.saved_steps()
    facts["progress"] = _progress(run)
    facts["model"] = _model(load_model(run)) if run.saved_steps() else None
    return facts


def _progress(run: Run) -> dict[str, Any]:
    """Return the last value of each logged quantity, and the best validation."""
    last: dict[str, Any] = {}
    for record in (records := list(read_log(run.log))):
        last |= record
    validated = [record for record in records if "validation_bits_per_byte" in record]
    if validated:
        best = min(validated, key=lambda record: record["validation_bits_per_byte"])
        last |= {"best_validation_bits_per_byte": best["validation_bits_per_byte"], "best_step": best["step"]}
    return last


def _model(model: LanguageModel) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "configuration": model.config.to_dict()} | _state_size(model)


def _state_size(model: LanguageModel) -> dict[str, int | float]:
    """Return the bytes of state per sequence, measured with every window full, and the bytes that each further token
    adds: none, unless softmax attends to all the past."""
    full = model.config.max_length or 2 * model.config.window
    state, sizes = None, []
    with torch.inference_mode():
        # learned positions end, and then nothing can grow any more
        for length in (full, 0 if model.config.max_length else full):
            if length:
                _, state = model.extend_hidden(torch.zeros(1, length, dtype=torch.long), state)
            sizes.append(_num_bytes(state))
    return {"state_bytes": sizes[0], "state_bytes_per_further_token": (sizes[1] - sizes[0]) / full}


def _num_bytes(state: Any) -> int:
    sizes: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_state(count, state)
    return sum(sizes)


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    progress, versions = facts["progress"], facts["versions"]
    ending = f"complete {facts['finished']}" if facts["finished"] else "not complete"
    yield f"run          {facts['run']}, begun {facts['created']}, {ending}"
    yield f"made with    {', '.join(f'{name} {version}' for name, version in versions.items())}"
    yield f"processes    {facts['processes']}"
    for name, part in facts["data"].items():
        yield f"{name:<12} {part['bytes']:,} bytes in {part['documents']:,} files, {part['tokens']:,} tokens"
    yield f"data         {' '.join(facts['paths'])}"
    yield f"tokens       {facts['tokenizer'] or 'bytes'}, {facts['vocabulary']:,} kinds"
    yield from _model_lines(facts["model"])
    yield f"training     {_settings(facts['options'])}"
    yield f"progress     {_progress_text(progress)}"
    yield f"checkpoints  {', '.join(map(str, facts['checkpoints'])) or 'none'}"


def _model_lines(model: dict[str, Any] | None) -> Iterator[str]:
    if model is None:
        return
    yield f"parameters   {model['parameters']:,}"
    yield f"model        {_settings(model['configuration'])}"
    growth = model["state_bytes_per_further_token"]
    constant = f", and {growth:,.0f} more for each further token" if growth else ", however long it gets"
    yield f"state        {model['state_bytes']:,} bytes per sequence{constant}"


def _settings(values: dict[str, Any]) -> str:
    """Return the settings that differ from "off"."""
    return ", ".join(f"{name} {_shown(value)}" for name, value in values.items() if value not in (None, False, [], ""))


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _progress_text(progress: dict[str, Any]) -> str:
    if not progress:
        return "none yet"
    text = f"step {progress['step']:,}, {progress['tokens']:,} tokens, {progress['seconds']:,.0f} s"
    for part in ("training", "validation"):
        if (name := f"{part}_bits_per_byte") in progress:
            text += f", {part} {progress[name]:.3f} bits/byte"
    if "best_step" in progress:
        text += f", best {progress['best_validation_bits_per_byte']:.3f} at step {progress['best_step']:,}"
    return text
