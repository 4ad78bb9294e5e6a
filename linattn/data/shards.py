"""Rows of data sets become Arrow files of tokens, which `datasets` writes and maps into memory."""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from linattn.console.errors import CommandError, explained
from linattn.data.encoder import Encoder
from linattn.data.part import Part
from linattn.data.row import Piece, TokenRow
from linattn.data.sources import Rows, documents, rows_extra

BATCH_BYTES = 1 << 20
"""The bytes of text that a tokenizer gets at a time, or one document if that has more."""
DOCUMENTS = 256
"""The documents that are in memory until they are written."""
TOKENS, BYTES, LOST = "tokens", "bytes", "lost_bytes"


def write_rows(
    sources: Sequence[Rows], field: str, encoder: Encoder, folder: Path, validation_part: float
) -> list[Part]:
    """Write the documents in the `field` of all rows into Arrow files in the folder, in order. Return the part for
    training, and that for validation: the last documents, which have `validation_part` of the bytes."""
    with rows_extra():
        import datasets
        from datasets.exceptions import DatasetGenerationError
    digest, groups = hashlib.sha256(), batches(documents(sources, field), BATCH_BYTES)
    if (first := next(groups, None)) is None:
        return [Part(documents=0, bytes=0, tokens=0, lost_bytes=0, sha256=digest.hexdigest())] * 2

    def tokenized() -> Iterator[dict[str, Any]]:
        for texts in chain([first], groups):
            for text, tokens in zip(texts, encoder.encode_each(texts), strict=True):
                digest.update(text)
                row = np.concatenate([np.asarray(x, encoder.dtype) for x in (encoder.begin, tokens, encoder.end)])
                yield {TOKENS: row, BYTES: len(text), LOST: encoder.lost(text, tokens)}

    types = {"<u2": "uint16", "<u4": "uint32"}
    columns = {TOKENS: datasets.List(datasets.Value(types[encoder.dtype])), BYTES: datasets.Value("int64")}
    features = datasets.Features({**columns, LOST: datasets.Value("int64")})
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        # with a fingerprint of its own, nothing is hashed: the folder belongs to one run
        datasets.Dataset.from_generator(
            tokenized, features=features, cache_dir=str(folder), fingerprint="tokens", writer_batch_size=DOCUMENTS
        )
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    return _parts(folder, digest.hexdigest(), validation_part)


def batches(texts: Iterable[str], size: int) -> Iterator[list[bytes]]:
    """Group the texts that are not empty, as UTF-8, in batches that end when they have `size` bytes."""
    batch, total = list[bytes](), 0
    for text in texts:
        if text:
            # what JSON writes as half a character is none
            batch.append(encoded := text.encode("utf-8", "replace"))
            total += len(encoded)
        if total >= size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _parts(folder: Path, digest: str, validation_part: float) -> list[Part]:
    columns = _columns(folder)
    sizes = columns[BYTES].chunks
    total = sum(int(chunk.to_numpy().sum()) for chunk in sizes)
    border, cut = total - int(total * validation_part), 0
    for chunk in sizes:
        starts = np.cumsum(chunk.to_numpy()) - chunk.to_numpy()
        cut += int(np.searchsorted(starts, border))
        border -= int(chunk.to_numpy().sum())
    count = sum(map(len, sizes))
    return [_part(columns, folder, digest, first, last) for first, last in ((0, cut), (cut, count))]


def _part(columns: dict[str, Any], folder: Path, digest: str, first: int, last: int) -> Part:
    size, lost = (
        sum(int(chunk.to_numpy().sum()) for chunk in columns[name].slice(first, last - first).chunks)
        for name in (BYTES, LOST)
    )
    tokens = len(_row(columns, first, last))
    part = Part(documents=last - first, bytes=size, tokens=tokens, lost_bytes=lost, sha256=digest)
    part.update(shards=folder.name, first=first)
    return part


def open_rows(folder: Path, part: Part) -> TokenRow:
    """Return the part's row of tokens from the Arrow files in the folder."""
    first = part.get("first", 0)
    row = _row(_columns(folder), first, first + part["documents"])
    if len(row) != part["tokens"]:
        raise CommandError(f"the data are damaged: {folder} has {len(row)} tokens instead of {part['tokens']}")
    return row


def _columns(folder: Path) -> dict[str, Any]:
    """Map the columns of all Arrow files in the folder into memory."""
    with rows_extra():
        import datasets
        import pyarrow
    if not (files := sorted(folder.rglob("*.arrow"))):
        raise CommandError(f"the data are lost: there is no Arrow file in {folder}")
    with explained(f"the data in {folder} are damaged", pyarrow.ArrowException):
        tables = [datasets.Dataset.from_file(str(file)).data for file in files]
    return {
        name: pyarrow.chunked_array([chunk for table in tables for chunk in table.column(name).chunks])
        for name in (TOKENS, BYTES, LOST)
    }


def _row(columns: dict[str, Any], first: int, last: int) -> TokenRow:
    """Return the row of the documents from number `first` on and before `last`."""
    chunks = columns[TOKENS].slice(first, last - first).chunks
    return TokenRow(_piece(chunk) for chunk in chunks if len(chunk))


def _piece(chunk: Any) -> Piece:
    edges = chunk.offsets.to_numpy()
    return Piece(chunk.values.to_numpy()[edges[0] : edges[-1]], edges)
