"""A run is a folder: a model that loads anywhere, and all that is needed to describe and resume it.

config.json, model.safetensors   the last checkpoint's weights, for LanguageModel.load and from_pretrained
run.json                         the options, the data and the versions
tokenizer.json                   if there is one
log.jsonl, curve.png             how the training went
data/                            the tokens
checkpoints/checkpoint-…/        what --resume needs"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.cli.atomic import copy_atomically, remove_atomically, remove_leftovers, rename_durably, write_atomically
from linattn.cli.errors import CommandError, explained
from linattn.cli.vocabulary import Vocabulary, load_vocabulary
from linattn.models import LanguageModel
from linattn.models.storage import CONFIG, WEIGHTS

FORMAT = 1
FIELDS = ("created", "finished", "paths", "options", "tokenizer", "vocabulary", "data", "processes", "versions")
DESCRIPTION = "run.json"
TOKENIZER = "tokenizer.json"
MANIFEST = "files.json"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Run:
    folder: Path
    description: dict[str, Any]

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def curve(self) -> Path:
        return self.folder / "curve.png"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def tokens_per_byte(self) -> dict[str, float]:
        return {name: part["tokens"] / part["bytes"] for name, part in self.description["data"].items()}

    def vocabulary(self) -> Vocabulary:
        vocabulary = load_vocabulary(self.folder / TOKENIZER if self.description["tokenizer"] else None)
        if vocabulary.size != self.description["vocabulary"]:
            expected = self.description["vocabulary"]
            raise CommandError(f"{self.folder / TOKENIZER} has {vocabulary.size} tokens, but the run has {expected}")
        return vocabulary

    def saved_steps(self) -> list[int]:
        """Return the steps of the checkpoints, in order."""
        if not self.checkpoints.is_dir():
            return []
        found = (CHECKPOINT.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"checkpoint-{step}"


def is_run(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def require_free(folder: Path, *, replace: bool) -> None:
    """Refuse to overwrite a run by accident, and to delete anything that is not a run."""
    if is_run(folder) and not replace:
        raise CommandError(f"there is a run in {folder} already: --resume goes on with it, --replace deletes it first")
    if not is_run(folder) and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} exists and is no run: choose another --out")


def open_run(folder: Path) -> Run:
    path = folder / DESCRIPTION
    if not path.is_file():
        raise CommandError(f"there is no run in {folder}: it has no {DESCRIPTION}")
    try:
        description = json.loads(path.read_bytes())
        version = description["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path} is corrupt: it is not the description of a run") from error
    if version != FORMAT:
        writer = description.get("versions", {}).get("linattn", "unknown")
        raise CommandError(
            f"{path} was written by linattn {writer} in format {version}, but this version reads format {FORMAT}"
        )
    if missing := [name for name in FIELDS if name not in description]:
        raise CommandError(f"{path} is corrupt: it lacks {', '.join(missing)}")
    return Run(folder, description)


def load_model(run: Run) -> LanguageModel:
    if not (run.folder / CONFIG).exists():
        raise CommandError(f"{run.folder} has no weights yet: its first checkpoint is still to come")
    with explained(f"{run.folder} is corrupt", ValueError):
        return LanguageModel.load(run.folder)


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a log. The last line may be incomplete, while or after it was written."""
    lines = path.read_text().splitlines() if path.is_file() else []
    for line in lines:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def rewind_log(path: Path, step: int) -> None:
    """Drop the records after the step from which a run is resumed."""
    records = [record for record in read_log(path) if record["step"] <= step]
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))


def adopt_checkpoint(run: Run, partial: Path, step: int, keep: int) -> None:
    """Give the complete checkpoint its name, make its weights the run's, and delete the oldest checkpoints."""
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    digests = {str(file.relative_to(partial)): _digest(file) for file in files}
    write_atomically(partial / MANIFEST, json.dumps(digests, indent=2))
    rename_durably(partial, run.checkpoint(step))
    _publish(run, step, keep)


def recover(run: Run, step: int, keep: int) -> None:
    """Restore the run to its state right after the checkpoint of `step`, whenever the process was killed."""
    remove_leftovers(run.folder)
    remove_leftovers(run.checkpoints)
    rewind_log(run.log, step)
    if step:
        _publish(run, step, keep)


def _publish(run: Run, step: int, keep: int) -> None:
    # the weights first: a folder with a configuration is a folder with a model
    for name in (WEIGHTS, CONFIG):
        copy_atomically(run.checkpoint(step) / name, run.folder / name)
    for old in run.saved_steps()[:-keep]:
        remove_atomically(run.checkpoint(old))


def last_checkpoint(run: Run) -> Path | None:
    """Return the folder of the newest checkpoint, or None; raise if a file has changed since it was written."""
    if not (steps := run.saved_steps()):
        return None
    folder = run.checkpoint(steps[-1])
    try:
        expected = json.loads((folder / MANIFEST).read_bytes())
        damaged = [name for name, digest in expected.items() if _digest(folder / name) != digest]
    except (OSError, ValueError) as error:
        raise CommandError(f"{folder} is damaged: {error}{_alternative(steps)}") from error
    if damaged:
        raise CommandError(
            f"{folder} is damaged: {', '.join(damaged)} changed after it was written{_alternative(steps)}"
        )
    return folder


def _alternative(steps: list[int]) -> str:
    return f"; without it the run goes on from step {steps[-2]}" if len(steps) > 1 else ""


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
