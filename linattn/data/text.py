"""Files of text become one row of tokens on the disk: all of them, in order, each a document."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from linattn.console.errors import CommandError
from linattn.data.encoder import Encoder
from linattn.data.part import Part
from linattn.data.row import Piece, TokenRow

BLOCK_SIZE = 1 << 20
"""Bytes read at a time."""
LONGEST_LINE = 1 << 24
"""Bytes of a line that may follow them. A longer line is cut, so that a file of one line costs no memory."""


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


def write_texts(extents: Sequence[Extent], encoder: Encoder, path: Path) -> Part:
    """Write the tokens of the extents to `path`, each as a document, and the places where these begin beside it."""
    size, tokens_count, lost, digest = 0, 0, 0, hashlib.sha256()
    with open(path, "wb") as tokens_file, open(_edges_path(path), "wb") as edges_file:
        for extent in extents:
            edges_file.write(np.int64(tokens_count).tobytes())
            for tokens, text in _encoded(extent, encoder):
                tokens_file.write(np.asarray(tokens, encoder.dtype).tobytes())
                tokens_count += len(tokens)
                size += len(text)
                lost += encoder.lost(text, tokens) if text else 0
                digest.update(text)
        edges_file.write(np.int64(tokens_count).tobytes())
    return Part(documents=len(extents), bytes=size, tokens=tokens_count, lost_bytes=lost, sha256=digest.hexdigest())


@final
class FileTokens:
    """The tokens in a file. A slice reads its own, and unlike the pages of a memory map, none stay resident."""

    def __init__(self, path: Path, dtype: str, length: int) -> None:
        self.path, self.dtype, self.length = path, np.dtype(dtype), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.length)
        return np.fromfile(self.path, self.dtype, max(0, stop - start), offset=start * self.dtype.itemsize)


def open_texts(path: Path, part: Part, dtype: str) -> TokenRow:
    """Return the row of tokens that is at `path`."""
    sizes = {path: part["tokens"] * np.dtype(dtype).itemsize, _edges_path(path): 8 * (part["documents"] + 1)}
    for file, wanted in sizes.items():
        if not file.is_file():
            raise CommandError(f"the data are lost: there is no {file}")
        if (size := file.stat().st_size) != wanted:
            raise CommandError(f"the data are damaged: {file} has {size} bytes instead of {wanted}")
    if not part["tokens"]:
        # an empty file cannot be mapped
        return TokenRow([])
    edges = np.memmap(_edges_path(path), "<i8", mode="r")
    return TokenRow([Piece(FileTokens(path, dtype, part["tokens"]), edges)])


def _edges_path(path: Path) -> Path:
    return path.with_suffix(".edges")


def _encoded(extent: Extent, encoder: Encoder) -> Iterator[tuple[Sequence[int], bytes]]:
    """Yield tokens with their text, in pieces that end with a line, so that a tokenizer never meets half a word. A line
    that is too long ends with a character."""
    yield encoder.begin, b""
    left = extent.stop - extent.start
    with open(extent.path, "rb") as stream:
        stream.seek(extent.start)
        while left and (text := stream.read(BLOCK_SIZE)):
            text += stream.readline(LONGEST_LINE)
            if not text.endswith(b"\n"):
                place = stream.tell()
                text += stream.read(_character_boundary(extent.path, place) - place)
            text = text[:left]
            left -= len(text)
            yield encoder.encode(text), text
    yield encoder.end, b""
