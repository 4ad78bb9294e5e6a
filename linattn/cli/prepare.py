"""Prepare a run before training: a new folder with the tokens of its data, and a description."""

import dataclasses
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from linattn.cli.options import TrainOptions
from linattn.cli.run_folder import FORMAT, Run, is_run
from linattn.cli.vocabulary import Vocabulary
from linattn.console.atomic import atomic_folder, remove_atomically
from linattn.console.machine import timestamp
from linattn.console.processes import launch_name
from linattn.data.corpus import Choice, write_data
from linattn.data.part import Parts
from linattn.integrations.transformers import byte_tokenizer, file_tokenizer, save_for_transformers
from linattn.version import __version__

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "safetensors")


def create_run(
    folder: Path, paths: Sequence[str], options: TrainOptions, vocabulary: Vocabulary, *, processes: int
) -> None:
    choice = Choice(
        paths=paths,
        include=options.include,
        exclude=options.exclude,
        field=options.field,
        validation_part=options.validation_part,
        validation_paths=options.validation_data,
    )
    with atomic_folder(folder) as partial:
        run = Run(partial, {"format": FORMAT, "created": timestamp(), "finished": None, "paths": list(paths)})
        run.data.mkdir()
        data = write_data(choice, vocabulary, run.data, context=options.context)
        tokenizer = byte_tokenizer() if options.tokenizer is None else file_tokenizer(options.tokenizer)
        save_for_transformers(tokenizer, partial)
        run.describe(
            options=dataclasses.asdict(options),
            tokenizer=None if options.tokenizer is None else vocabulary.name,
            vocabulary=vocabulary.size,
            data=data,
            versions={"linattn": __version__, "python": platform.python_version()}
            | {name: version(name) for name in PACKAGES},
            processes=processes,
            launch=launch_name(),
        )
        if is_run(folder):
            remove_atomically(folder)
    _report_losses(vocabulary, data)


def _report_losses(vocabulary: Vocabulary, data: Parts) -> None:
    parts = data["training"], data["validation"]
    lost, total = (sum(part[name] for part in parts) for name in ("lost_bytes", "bytes"))
    if lost:
        print(
            f"{vocabulary.name} cannot give the text back: {100 * lost / total:.2g} % of the bytes are lost (unknown "
            "characters, normalisation, bytes that are no UTF-8), so bits per byte are too low",
            file=sys.stderr,
        )
