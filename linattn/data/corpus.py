"""The data of a run or a conversion: a folder with the tokens for training and for validation."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linattn.console.errors import CommandError
from linattn.data.encoder import Encoder
from linattn.data.part import Part, Parts
from linattn.data.row import TokenRow
from linattn.data.shards import open_rows, write_rows
from linattn.data.sources import Sources, find_sources
from linattn.data.text import entire, open_texts, split, write_texts


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Says which data to take: all data at the `paths`. In folders, `include` and `exclude` choose the files; in rows,
    `field` is the name of the text's field. Validation takes the data at `validation_paths` or, without any, the last
    `validation_part` of the bytes."""

    paths: Sequence[str]
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    field: str = "text"
    validation_part: float = 0.05
    validation_paths: Sequence[str] = ()

    def sources(self, paths: Sequence[str]) -> Sources:
        return find_sources(paths, self.include, self.exclude)


def write_data(choice: Choice, encoder: Encoder, folder: Path, *, context: int) -> Parts:
    """Write the tokens of the data into the folder. Raise CommandError unless both parts have `context` tokens."""
    sources = [choice.sources(paths) for paths in (choice.paths, choice.validation_paths) if paths]
    _check_distinct([name for each in sources for name in each.names])
    if choice.field != Choice.field and not any(each.rows for each in sources):
        raise CommandError(
            f"--field {choice.field} is for rows, in files of .jsonl, .jsonl.gz or .parquet or in data sets, but the "
            f"data are text, such as {sources[0].texts[0]}"
        )
    if len(sources) == 1:
        parts = _write(choice, sources[0], encoder, folder, ("training", "validation"))
    else:
        pairs = zip(sources, ("training", "validation"), strict=True)
        parts = [part for each, name in pairs for part in _write(choice, each, encoder, folder, (name,))]
    training, validation = parts
    data: Parts = {"training": training, "validation": validation}
    check_lengths(data, context)
    return data


def _check_distinct(names: Sequence[str]) -> None:
    """Raise CommandError for files or data sets that are there twice: what is trained on validates nothing."""
    counts = Counter(map(os.path.abspath, names))
    if twice := next((name for name in names if counts[os.path.abspath(name)] > 1), None):
        raise CommandError(
            f"{twice} is twice in the data for training and validation: name it once, or leave it out of a folder by "
            "--exclude"
        )


def check_lengths(parts: Parts, context: int) -> None:
    """Raise CommandError unless both parts have `context` tokens."""
    for name, part in (("training", parts["training"]), ("validation", parts["validation"])):
        if part["tokens"] < context:
            have = f"{part['tokens']:,} tokens of {name} data" if part["bytes"] else f"no {name} data"
            raise CommandError(
                f"the data are too short: there are {have}, but a context of {context:,} needs at least {context:,}"
            )


def _write(choice: Choice, sources: Sources, encoder: Encoder, folder: Path, names: Sequence[str]) -> Sequence[Part]:
    """Write the data of the sources into the parts with these `names`: "training", "validation", or both, between which
    the data are divided. Return the parts."""
    share = choice.validation_part if len(names) > 1 else 0.0
    if sources.rows:
        return write_rows(sources.rows, choice.field, encoder, folder / names[0], share)[: len(names)]
    extents = [entire(sources.texts)] if len(names) == 1 else split(sources.texts, share)
    return [write_texts(x, encoder, _tokens_file(folder, name)) for x, name in zip(extents, names, strict=True)]


def open_data(folder: Path, name: str, part: Part, dtype: str) -> TokenRow:
    """Return the row of tokens for "training" or "validation" that is in the folder."""
    if "shards" in part:
        return open_rows(folder / part["shards"], part)
    return open_texts(_tokens_file(folder, name), part, dtype)


def _tokens_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.tokens"
