"""Prepare a run before training: files become rows of tokens in a new folder, with a description."""

import dataclasses
import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from linattn.cli.options import TrainOptions
from linattn.cli.run_folder import FORMAT, Run, is_run
from linattn.cli.vocabulary import Vocabulary
from linattn.console.atomic import atomic_folder, remove_atomically
from linattn.console.errors import CommandError
from linattn.console.files import find_files
from linattn.console.machine import timestamp
from linattn.integrations.transformers import byte_tokenizer, file_tokenizer, save_for_transformers
from linattn.version import __version__

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "safetensors")
BLOCK_SIZE = 1 << 24
"""Bytes read at a time."""


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


class Extent(NamedTuple):
    """A part of a file."""

    path: Path
    start: int
    stop: int


def entire(files: Iterable[Path]) -> list[Extent]:
    return _non_empty(Extent(file, 0, os.path.getsize(file)) for file in files)


def split(files: Iterable[Path], validation_part: float) -> tuple[list[Extent], list[Extent]]:
    """Return the extents for training, and those for validation: the last `validation_part` of all bytes."""
    extents = entire(files)
    total = sum(extent.stop for extent in extents)
    left = total - int(total * validation_part)
    training, validation = [], []
    for file, _, size in extents:
        cut = _character_boundary(file, left) if 0 < left < size else max(0, min(left, size))
        training.append(Extent(file, 0, cut))
        validation.append(Extent(file, cut, size))
        left -= size
    return _non_empty(training), _non_empty(validation)


def _non_empty(extents: Iterable[Extent]) -> list[Extent]:
    return [extent for extent in extents if extent.stop > extent.start]


def _character_boundary(file: Path, cut: int) -> int:
    """Return the first start of a UTF-8 character from `cut` on, or the file's end; in other data, `cut` itself."""
    with open(file, "rb") as stream:
        stream.seek(cut)
        following = stream.read(4)
    # a character has at most three bytes after its first, and they are 10xxxxxx
    inside = next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))
    return cut + inside % 4


def write_tokens(extents: Sequence[Extent], vocabulary: Vocabulary, path: Path) -> dict[str, Any]:
    """Write the tokens of the extents as one row, each extent after a separator; return its description for `run.json`,
    a `Part`. The `lost_bytes` cannot be restored from the tokens."""
    part, digest = {"documents": len(extents), "bytes": 0, "tokens": 0, "lost_bytes": 0}, hashlib.sha256()
    with open(path, "wb") as out:
        for tokens, text in _documents(extents, vocabulary):
            out.write(np.asarray(tokens, vocabulary.dtype).tobytes())
            part["bytes"] += len(text)
            part["tokens"] += len(tokens)
            part["lost_bytes"] += vocabulary.lost(text, tokens)
            digest.update(text)
    return part | {"sha256": digest.hexdigest()}


def _documents(extents: Iterable[Extent], vocabulary: Vocabulary) -> Iterator[tuple[Sequence[int], bytes]]:
    """Yield tokens with their text, in pieces that end with a line, so that a tokenizer never meets half a word."""
    for extent in extents:
        yield [vocabulary.separator], b""
        left = extent.stop - extent.start
        with open(extent.path, "rb") as stream:
            stream.seek(extent.start)
            while text := (stream.read(BLOCK_SIZE) + stream.readline(left))[:left]:
                left -= len(text)
                yield vocabulary.encode(text), text
