"""Files become two rows of tokens: all of them, in order, the last bytes for validation."""

import numpy as np
import psutil
import pytest

from linattn.cli.run_folder import Run
from linattn.cli.vocabulary import Bytes, Tokenizer
from linattn.console.errors import CommandError
from linattn.console.files import find_files
from linattn.data import text as text_module
from linattn.data.part import Part
from linattn.data.text import entire, open_texts, split, write_texts


def text_of(extents) -> bytes:
    return b"".join(extent.path.read_bytes()[extent.start : extent.stop] for extent in extents)


def test_what_was_read_does_not_stay_in_memory(tmp_path):
    """Windows all over a file of 256 MB, of which a memory map would keep 64 MB or more."""
    size, process = 2**27, psutil.Process()
    for suffix, content in ((".tokens", 2 * size), (".edges", 16)):
        with open(tmp_path / f"training{suffix}", "wb") as file:
            file.truncate(content)
    part = Part(documents=1, bytes=size, tokens=size, lost_bytes=0, sha256="")
    row = open_texts(tmp_path / "training.tokens", part, "<u2")
    before = process.memory_info().rss
    for start in range(0, size - 512, 2**13):
        assert len(row[start : start + 512]) == 512
    assert process.memory_info().rss - before < 2**24
    assert len(row[size - 5 : size + 5]) == 5 and len(row[size + 5 :]) == 0


@pytest.mark.parametrize("part", [0.01, 0.05, 0.3, 0.5, 0.99])
def test_the_split_is_the_last_bytes_of_all(text, part):
    everything = text_of(entire(find_files([str(text)])))
    training, validation = map(text_of, split(find_files([str(text)]), part))
    assert training + validation == everything
    assert 0 <= int(len(everything) * part) - len(validation) <= 3


def test_the_split_never_cuts_a_character(tmp_path):
    file = tmp_path / "text"
    file.write_text("aé€𝄞" * 10, encoding="utf-8")
    for part in np.linspace(0.01, 0.99, 99):
        for extents in split([file], part):
            text_of(extents).decode("utf-8")


def test_data_that_are_no_text_can_be_split_anywhere(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(b"\x80" * 100)
    training, validation = split([file], 0.5)
    assert len(text_of(training)) == len(text_of(validation)) == 50


def test_each_document_begins_with_the_separator(tmp_path):
    contents = [b"one", b"\xff\x00\xfe two", b"", b"three"]
    for i, content in enumerate(contents):
        (tmp_path / f"{i}").write_bytes(content)
    vocabulary = Bytes()
    part = write_texts(entire(find_files([str(tmp_path)])), vocabulary, tmp_path / "data.tokens")
    row = open_texts(tmp_path / "data.tokens", part, vocabulary.dtype)
    assert row[:].tolist() == [256, *contents[0], 256, *contents[1], 256, *contents[3]]
    assert row.document_starts(0, len(row)).tolist() == [0, 4, 12]
    assert (part["documents"], part["bytes"], part["tokens"]) == (3, 15, 18)


@pytest.mark.parametrize("piece", [1, 7, 100, 1000])
def test_pieces_make_the_whole(text, tokenizer, tmp_path, monkeypatch, piece):
    extents = entire(find_files([str(text)]))
    for vocabulary in (Bytes(), Tokenizer(tokenizer)):
        expected = write_texts(extents, vocabulary, tmp_path / "whole")
        with monkeypatch.context() as patch:
            patch.setattr(text_module, "BLOCK_SIZE", piece)
            assert write_texts(extents, vocabulary, tmp_path / "pieces") == expected
        assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_long_line_is_read_in_pieces_of_whole_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK_SIZE", 5)
    monkeypatch.setattr(text_module, "LONGEST_LINE", 7)
    file, pieces = tmp_path / "text", []

    class Recorder:
        begin, end, dtype = (256,), (), "<u2"

        def encode(self, text):
            pieces.append(text)
            return memoryview(text)

        def lost(self, text, tokens):
            return 0

    for content in ("aé€𝄞" * 30, "a\n" + "𝄞" * 30, "short\n" * 9 + "é" * 9):
        pieces.clear()
        file.write_text(content, encoding="utf-8", newline="")
        write_texts(entire([file]), Recorder(), tmp_path / "tokens")
        assert b"".join(pieces) == content.encode() and max(map(len, pieces)) <= 5 + 7 + 3
        assert all(piece.decode() for piece in pieces)


def test_the_split_does_not_depend_on_the_vocabulary(text, tokenizer, tmp_path):
    for extents in split(find_files([str(text)]), 0.2):
        one = write_texts(extents, Bytes(), tmp_path / "bytes")
        other = write_texts(extents, Tokenizer(tokenizer), tmp_path / "bpe")
        assert one["sha256"] == other["sha256"]
        assert one["bytes"] == other["bytes"]
        assert one["tokens"] > 2 * other["tokens"]


def test_damaged_data_are_noticed(tmp_path):
    tokens = {"training": 5, "validation": 6}
    data = {name: {"documents": 1, "tokens": number} for name, number in tokens.items()}
    run = Run(tmp_path, {"vocabulary": 257, "data": data})
    run.data.mkdir()
    for name in tokens:
        (run.data / f"{name}.tokens").write_bytes(bytes(10))
        (run.data / f"{name}.edges").write_bytes(np.array((0, 5)).astype("<i8").tobytes())
    assert len(run.tokens("training")) == 5
    with pytest.raises(CommandError, match="10 bytes instead of 12"):
        run.tokens("validation")
    for size in (0, 8):
        (run.data / "training.edges").write_bytes(bytes(size))
        with pytest.raises(CommandError, match=rf"training\.edges has {size} bytes instead of 16"):
            run.tokens("training")
    for name, kind in (("validation", "tokens"), ("training", "edges")):
        (run.data / f"{name}.{kind}").unlink()
        with pytest.raises(CommandError, match=rf"there is no .*{name}\.{kind}"):
            run.tokens(name)
