"""Prepare a run before training: its folder with the data and a description."""

import dataclasses
import json
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from linattn.cli.atomic import atomic_folder, copy_atomically, remove_atomically, write_atomically
from linattn.cli.corpus import Extent, entire, find_files, split, write_corpus
from linattn.cli.errors import CommandError
from linattn.cli.options import TrainOptions
from linattn.cli.run_folder import DESCRIPTION, FORMAT, TOKENIZER, is_run
from linattn.cli.vocabulary import Vocabulary
from linattn.version import __version__

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "safetensors")


def create_run(
    folder: Path, paths: Sequence[str], options: TrainOptions, vocabulary: Vocabulary, *, processes: int
) -> None:
    training, validation = _extents(paths, options)
    with atomic_folder(folder) as partial:
        data = write_corpus(partial / "data", training, validation, vocabulary)
        _require_tokens(data, options.context)
        description = {
            "format": FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "finished": None,
            "paths": list(paths),
            "options": dataclasses.asdict(options),
            "tokenizer": vocabulary.name if options.tokenizer is not None else None,
            "vocabulary": vocabulary.size,
            "data": data,
            "versions": {"linattn": __version__, "python": platform.python_version()}
            | {name: version(name) for name in PACKAGES},
            "processes": processes,
        }
        if options.tokenizer is not None:
            copy_atomically(Path(options.tokenizer), partial / TOKENIZER)
        write_atomically(partial / DESCRIPTION, json.dumps(description, indent=2) + "\n")
        if is_run(folder):
            remove_atomically(folder)
    _report_losses(vocabulary, data)


def _extents(paths: Sequence[str], options: TrainOptions) -> tuple[list[Extent], list[Extent]]:
    files = find_files(paths, options.include, options.exclude)
    if options.validation_data:
        return entire(files), entire(find_files(options.validation_data, options.include, options.exclude))
    return split(files, options.validation_part)


def _require_tokens(data: dict[str, dict[str, Any]], context: int) -> None:
    for name, part in data.items():
        if part["tokens"] < context:
            have = f"{part['tokens']:,} tokens of {name} data" if part["bytes"] else f"no {name} data"
            raise CommandError(
                f"the data are too short: there are {have}, but a context of {context:,} needs at least {context:,}"
            )


def _report_losses(vocabulary: Vocabulary, data: dict[str, dict[str, Any]]) -> None:
    lost, total = (sum(part[name] for part in data.values()) for name in ("lost_bytes", "bytes"))
    if lost:
        print(
            f"{vocabulary.name} cannot give the text back: {100 * lost / total:.2g} % of the bytes are lost (unknown "
            "characters, normalisation, bytes that are no UTF-8), so bits per byte are too low",
            file=sys.stderr,
        )
