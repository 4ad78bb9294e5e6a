"""A run is a folder: a model that loads anywhere, and all that is needed to describe and resume it.

config.json, model.safetensors   the last checkpoint's weights, for LanguageModel.load and from_pretrained
run.json                         the options, the data and the versions
tokenizer.json                   the tokenizer for transformers, also if tokens are bytes
log.jsonl, curve.png             how the training went
data/                            the tokens: one file per part, or Arrow files for documents in rows
checkpoints/checkpoint-…/        what --resume needs"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

from typing_extensions import TypedDict

from linattn.cli.typed_json import read_json
from linattn.cli.vocabulary import Vocabulary, load_vocabulary
from linattn.console.atomic import write_atomically
from linattn.console.errors import CommandError, explained
from linattn.data.encoder import token_dtype
from linattn.data.part import Parts
from linattn.models import LanguageModel
from linattn.models.storage import CONFIG, TOKENIZER

if TYPE_CHECKING:
    from linattn.data.row import TokenRow

FORMAT = 1


class Description(TypedDict):
    created: str
    finished: str | None
    paths: list[str]
    options: dict[str, Any]
    tokenizer: str | None
    vocabulary: int
    data: Parts
    processes: int
    versions: dict[str, str]
    launch: NotRequired[str | None]


class Logged(TypedDict, extra_items=float | None):
    """The numbers that each line of the log has, beside others."""

    step: int
    tokens: int
    seconds: float


DESCRIPTION = "run.json"


class Run:
    def __init__(self, folder: Path, description: dict[str, Any]) -> None:
        self.folder, self.description = folder, description
        self.log, self.curve, self.data = folder / "log.jsonl", folder / "curve.png", folder / "data"
        self.checkpoints = folder / "checkpoints"

    def describe(self, **changes: Any) -> None:
        """Set these fields of the description, run.json, and write it."""
        self.description |= changes
        text = json.dumps(self.description, indent=2, ensure_ascii=False) + "\n"
        # the name of a file may have bytes that are no UTF-8, which no reader of JSON takes
        write_atomically(self.folder / DESCRIPTION, text.encode("utf-8", "replace").decode())

    def tokens(self, part: str) -> "TokenRow":
        """Return the run's tokens for "training" or "validation"."""
        from linattn.data.corpus import open_data

        return open_data(self.data, part, self.description["data"][part], token_dtype(self.description["vocabulary"]))

    def vocabulary(self) -> Vocabulary:
        path, expected = self.folder / TOKENIZER, self.description["vocabulary"]
        vocabulary = load_vocabulary(path if self.description["tokenizer"] else None)
        if vocabulary.size != expected:
            raise CommandError(f"{path} has {vocabulary.size} tokens, but the run has {expected}")
        return vocabulary

    def model(self) -> LanguageModel:
        if not (self.folder / CONFIG).exists():
            raise CommandError(f"{self.folder} has no weights yet: its first checkpoint is still to come")
        with explained(f"{self.folder} is corrupt", ValueError):
            return LanguageModel.load(self.folder)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of the log up to an incomplete line, such as a last one that is still being written."""
        for line in self.log.read_bytes().splitlines() if self.log.is_file() else ():
            try:
                record = json.loads(line)
            except ValueError:
                return
            with explained(f"{self.log} is corrupt: a line is {line.decode()}", ValueError):
                read_json(Logged, line)
            yield record

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"checkpoint-{step}"

    def saved_steps(self) -> list[int]:
        """Return the steps of the checkpoints, in order."""
        names = [entry.name for entry in self.checkpoints.glob("checkpoint-*")]
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"checkpoint-(\d+)", name)))


def is_run(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def is_pretrained(folder: Path) -> bool:
    """Return whether this is no run, but a folder that transformers loads."""
    return not is_run(folder) and (folder / CONFIG).is_file()


def require_free(folder: Path, *, replace: bool) -> None:
    """Refuse to overwrite a run by accident, and to delete anything that is not a run."""
    if folder.name in ("", ".."):
        raise CommandError(f"--out must end with the name of a folder for the run, but is {folder}")
    # Python writes bytes that are no UTF-8 as surrogates
    if any("\ud800" <= character <= "\udfff" for character in str(folder.absolute())):
        raise CommandError(f"--out must be a path in UTF-8, as safetensors takes no other, but is {str(folder)!a}")
    if folder.is_symlink():
        raise CommandError(f"{folder} is a link: name the folder itself as --out")
    if is_run(folder) and not replace:
        raise CommandError(f"there is a run in {folder} already: --resume goes on with it, --replace deletes it first")
    if not is_run(folder) and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} exists and is no run: choose another --out")


def open_run(folder: Path) -> Run:
    path = folder / DESCRIPTION
    if not path.is_file():
        raise CommandError(f"there is no run in {folder}: it has no {DESCRIPTION}")
    with explained(f"{path} is corrupt: it is not the description of a run", ValueError, KeyError, TypeError):
        text = path.read_bytes()
        description = json.loads(text)
        version = description["format"]
    if version != FORMAT:
        writer = description.get("versions", {}).get("linattn", "unknown")
        raise CommandError(
            f"{path} was written by linattn {writer} in format {version}, but this version reads format {FORMAT}"
        )
    with explained(f"{path} is corrupt", ValueError):
        read_json(Description, text)
    return Run(folder, description)
