"""Prepare a run before training: its folder with the data and a description."""

import dataclasses
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from linattn.cli.atomic import atomic_folder, copy_atomically, remove_atomically
from linattn.cli.corpus import entire, find_files, split, write_tokens
from linattn.cli.errors import CommandError
from linattn.cli.options import TrainOptions
from linattn.cli.run_folder import FORMAT, TOKENIZER, Run, is_run, timestamp
from linattn.cli.vocabulary import Vocabulary
from linattn.version import __version__

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "safetensors")


def create_run(
    folder: Path, paths: Sequence[str], options: TrainOptions, vocabulary: Vocabulary, *, processes: int
) -> None:
    files = find_files(paths, options.include, options.exclude)
    if options.validation_data:
        parts = entire(files), entire(find_files(options.validation_data, options.include, options.exclude))
    else:
        parts = split(files, options.validation_part)
    with atomic_folder(folder) as partial:
        run = Run(partial, {"format": FORMAT, "created": timestamp(), "finished": None, "paths": list(paths)})
        run.data.mkdir()
        data = {
            name: write_tokens(extents, vocabulary, run.tokens(name))
            for name, extents in zip(("training", "validation"), parts, strict=True)
        }
        _require_tokens(data, options.context)
        if options.tokenizer is not None:
            copy_atomically(Path(options.tokenizer), partial / TOKENIZER)
        run.describe(
            options=dataclasses.asdict(options),
            tokenizer=None if options.tokenizer is None else vocabulary.name,
            vocabulary=vocabulary.size,
            data=data,
            versions={"linattn": __version__, "python": platform.python_version()}
            | {name: version(name) for name in PACKAGES},
            processes=processes,
        )
        if is_run(folder):
            remove_atomically(folder)
    _report_losses(vocabulary, data)


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
