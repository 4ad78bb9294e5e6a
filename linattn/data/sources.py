"""The sources of data: files of text, or rows of data sets, each row a document."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from linattn.checks import MissingPackage, extra
from linattn.console.errors import CommandError, explained
from linattn.console.files import find_files

HUB = "hub:"
HUB_FORM = f"{HUB}NAME[:CONFIG[:SPLIT]]"
DATA_HELP = (
    "files of text, or of one document per row (.jsonl, .jsonl.gz, .parquet); folders of such files; a folder that "
    f"`datasets` has saved; or {HUB_FORM}, a data set of Hugging Face's Hub, which is streamed"
)
ROWS = 1000
"""The number of rows that are read at a time."""


@contextmanager
def rows_extra() -> Iterator[None]:
    """Turn the import of a missing package into a CommandError that names the extra "data". For other missing packages
    the commands name their own extras, which do not install those that read rows."""
    with explained("rows cannot be read", MissingPackage), extra("data"):
        yield


class Rows(NamedTuple):
    """The rows of one file or data set. `read` yields them for the name of a field, and may leave out other fields."""

    name: str
    read: Callable[[str], Iterator[Any]]


class Sources(NamedTuple):
    """Files of text or rows: one of the two lists is empty."""

    texts: list[Path]
    rows: list[Rows]

    @property
    def names(self) -> list[str]:
        return [*map(str, self.texts), *(each.name for each in self.rows)]


def find_sources(paths: Sequence[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Sources:
    """Find the files and data sets at the paths; `include` and `exclude` are as in `find_files`. Text beside rows is
    refused, because it is rarely meant: a folder of rows often has a README."""
    texts, rows = list[Path](), list[Rows]()
    for path in paths:
        if path.startswith(HUB):
            rows.append(Rows(path, partial(_hub_rows, path)))
        elif (Path(path) / "state.json").is_file() and (Path(path) / "dataset_info.json").is_file():
            rows.append(Rows(path, partial(_saved_rows, path)))
        elif (Path(path) / "dataset_dict.json").is_file():
            splits = sorted(state.parent.name for state in Path(path).glob("*/state.json"))
            raise CommandError(f"{path} has several splits: name one of {', '.join(f'{path}/{x}' for x in splits)}")
        else:
            for file in find_files([path], include, exclude):
                if (read := _reader_of(file)) is None:
                    texts.append(file)
                else:
                    rows.append(Rows(str(file), partial(read, file)))
    if texts and rows:
        raise CommandError(
            f"the data are text, such as {texts[0]}, beside rows, such as those of {rows[0].name}: name one kind, or "
            "choose it by --include"
        )
    return Sources(texts, rows)


def documents(sources: Sequence[Rows], field: str) -> Iterator[str]:
    """Yield the text in the `field` of each row. Raise CommandError, with the file and the row, where it has none."""
    for name, read in sources:
        for number, row in enumerate(read(field), 1):
            yield _text(row, field, f"{name}, row {number}")


def _text(row: Any, field: str, place: str) -> str:
    if not isinstance(row, Mapping):
        raise CommandError(f"{place}: a row must be a JSON object with fields, but is a {type(row).__name__}")
    if isinstance(text := row.get(field), str):
        return text
    wrong = f"the field {field!r} holds no text, but {text!r:.40}" if field in row else f"there is no field {field!r}"
    raise CommandError(f"{place}: {wrong}; the fields are {', '.join(map(str, row)) or 'none'}: choose one by --field")


def _reader_of(file: Path) -> Callable[[Path, str], Iterator[Any]] | None:
    if file.name.endswith((".jsonl", ".jsonl.gz")):
        return _json_lines
    return _parquet_rows if file.suffix == ".parquet" else None


def _json_lines(file: Path, field: str) -> Iterator[Any]:
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rb") as lines, explained(f"{file} is damaged", EOFError, gzip.BadGzipFile, zlib.error):
        for number, line in enumerate(lines, 1):
            with explained(f"{file}, row {number} is no JSON", ValueError, RecursionError):
                # an empty line, such as the last one may be, is an empty document
                row = json.loads(line) if line.strip() else {field: ""}
            yield row


def _parquet_rows(file: Path, field: str) -> Iterator[Any]:
    with rows_extra():
        import pyarrow
        from pyarrow import parquet
    with explained(f"{file} is no Parquet file", pyarrow.ArrowException), parquet.ParquetFile(file) as table:
        names = table.schema_arrow.names
        if field not in names:
            yield dict.fromkeys(names)
        for rows in table.iter_batches(ROWS, columns=[field]):
            yield from rows.to_pylist()


def _saved_rows(path: str, field: str) -> Iterator[Any]:
    with rows_extra():
        from datasets import load_from_disk
    # a damaged folder may raise any exception
    with explained(f"{path} cannot be read", Exception):
        saved: Any = load_from_disk(path)
    if field not in saved.column_names:
        yield dict.fromkeys(saved.column_names)
    for rows in saved.select_columns([field]).iter(ROWS):
        yield from ({field: text} for text in rows[field])


def _hub_rows(path: str, field: str) -> Iterator[Any]:
    with rows_extra():
        from datasets import load_dataset
    if len(parts := path.removeprefix(HUB).split(":")) > 3:
        raise CommandError(f"a data set of the Hub must be {HUB_FORM}, but is {path}")
    name, config, split, *_ = [*parts, "", ""]
    # without a connection, or for an unknown name, the libraries raise many kinds of exceptions
    with explained(f"{path} cannot be read", Exception):
        streamed: Any = load_dataset(name, config or None, split=split or "train", streaming=True)
        rows = iter(streamed)
    while True:
        with explained(f"{path} cannot be read", Exception):
            try:
                row = next(rows)
            except StopIteration:
                return
        yield row
