"""Documents in rows: every format gives the same tokens, with the places where documents begin; errors say where."""

import gzip
import json
import re
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest

from linattn.cli.main import main
from linattn.cli.vocabulary import Bytes, Tokenizer
from linattn.console.errors import CommandError
from linattn.data import shards
from linattn.data.corpus import Choice, open_data, write_data
from linattn.data.row import Piece, TokenRow

TEXTS = [f"{'word ' * (number % 7)}über {number}" for number in range(60)]
EMPTY = 5
"""An empty document is none."""
TEXTS[EMPTY] = ""
FORMATS = ["lines.jsonl", "lines.jsonl.gz", "table.parquet", "saved", "folder", "hub"]


def write(path: Path, kind: str, texts: list[str], field: str = "text") -> str:
    """Write the texts in a format beside another field. Return DATA for the command line."""
    rows = datasets.Dataset.from_dict({"id": list(range(len(texts))), field: texts})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    target = path / kind
    if kind == "lines.jsonl":
        target.write_text(lines)
    elif kind == "lines.jsonl.gz":
        target.write_bytes(gzip.compress(lines.encode()))
    elif kind == "table.parquet":
        rows.to_parquet(target, batch_size=7)
    elif kind == "saved":
        rows.save_to_disk(target)
    else:
        # two files in a folder, which `datasets` reads in the order of their names
        target.mkdir()
        half = lines.index('{"id": 31')
        (target / "a.jsonl").write_text(lines[:half])
        (target / "b.jsonl").write_text(lines[half:] + "\n")
    return f"hub:{target}" if kind == "hub" else str(target)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_tokens(kind, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "DOCUMENTS", 16)
    data = write(tmp_path, kind, TEXTS, field="content")
    for vocabulary in (Bytes(), Tokenizer(tokenizer)):
        folder = tmp_path / vocabulary.name
        parts = write_data(Choice(paths=[data], field="content", validation_part=0.2), vocabulary, folder, context=8)
        rows = [open_data(folder, name, parts[name], vocabulary.dtype) for name in ("training", "validation")]
        documents = [[vocabulary.separator, *vocabulary.encode(text.encode())] for text in TEXTS if text]
        assert [*rows[0][:], *rows[1][:]] == [token for document in documents for token in document]
        starts = [row.document_starts(0, len(row)) + shift for row, shift in zip(rows, (0, len(rows[0])), strict=True)]
        assert np.concatenate(starts).tolist() == np.cumsum([0, *map(len, documents[:-1])]).tolist()
        size = sum(len(text.encode()) for text in TEXTS)
        assert sum(part["bytes"] for part in parts.values()) == size
        # validation is the first document that begins in its share, and all after that
        assert 0 <= int(0.2 * size) - parts["validation"]["bytes"] <= max(len(text.encode()) for text in TEXTS)
        assert sum(part["documents"] for part in parts.values()) == len(documents)
        assert all(part["tokens"] == len(row) for part, row in zip(parts.values(), rows, strict=True))


def test_a_row_is_read_in_any_piece_and_begins_documents_where_they_begin():
    random = np.random.default_rng(0)
    lengths = random.integers(1, 9, size=40)
    tokens, pieces = np.arange(lengths.sum()), []
    for part in np.split(np.arange(40), [3, 4, 17]):
        # an Arrow file counts from somewhere inside of it
        edges = np.cumsum([0, *lengths[part]])
        begin = int(lengths[: part[0]].sum())
        pieces.append(Piece(tokens[begin : begin + edges[-1]], edges + 100))
    row, starts = TokenRow(pieces), np.cumsum([0, *lengths[:-1]])
    for start in range(0, len(row), 5):
        for stop in range(start, len(row) + 1, 7):
            assert row[start:stop].tolist() == tokens[start:stop].tolist()
            inside = starts[(starts >= start) & (starts < stop)] - start
            assert row.document_starts(start, stop).tolist() == inside.tolist()


def refusal(data: str, folder: Path, **options) -> str:
    with pytest.raises(CommandError) as error:
        write_data(Choice(paths=[data], **options), Bytes(), folder / "data", context=8)
    return str(error.value)


@pytest.mark.parametrize("kind", FORMATS)
def test_without_the_library_the_extra_is_named(kind, tmp_path, monkeypatch, capsys):
    """Also by a command, whose own extra lacks it."""
    data = write(tmp_path, kind, TEXTS)
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", data, "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("linattn train: rows cannot be read: this needs ") and 'pip install "linattn[data]"' in line


@pytest.mark.parametrize("kind", FORMATS)
def test_a_missing_field_is_told_with_the_row_and_the_fields(kind, tmp_path):
    message = refusal(write(tmp_path, kind, TEXTS, field="content"), tmp_path)
    assert "row 1: there is no field 'text'; the fields are id, content: choose one by --field" in message
    assert kind.removeprefix("hub") in message


def test_a_field_of_text_is_refused(tmp_path):
    """JSON of another ending is text, which would be trained on as it is."""
    path = Path(write(tmp_path, "lines.jsonl", TEXTS, field="content"))
    json_file = path.rename(tmp_path / "lines.json")
    message = refusal(str(json_file), tmp_path, field="content")
    assert message.startswith("--field content is for rows, in files of .jsonl") and message.endswith(str(json_file))
    # it may be for one of the two kinds of data
    rows = write(tmp_path, "lines.jsonl", TEXTS, field="content")
    for paths in ([rows], [str(json_file)]), ([str(json_file)], [rows]):
        choice = Choice(paths=paths[0], validation_paths=paths[1], field="content")
        (folder := tmp_path / Path(paths[0][0]).suffix).mkdir()
        assert set(write_data(choice, Bytes(), folder, context=8)) == {"training", "validation"}


@pytest.mark.parametrize("kind", FORMATS)
def test_data_that_are_named_twice_are_refused(kind, tmp_path, monkeypatch):
    """They would be trained on twice, and validate what was trained on."""
    monkeypatch.chdir(tmp_path)
    data = write(Path(), kind, TEXTS)
    folder = ["."] if kind in ("lines.jsonl", "table.parquet") else [data]
    for paths, others in (([data, data], []), ([*folder, data], []), (folder, [data])):
        choice = Choice(paths=paths, validation_paths=others)
        with pytest.raises(CommandError, match=rf"{kind.removeprefix('hub')}.* is twice in the data .*--exclude"):
            write_data(choice, Bytes(), tmp_path / "none", context=8)
    assert not (tmp_path / "none").exists()


def test_wrong_rows_are_told_by_number(tmp_path):
    def error(content: bytes) -> str:
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "right"}\n\n' + content)
        return refusal(str(tmp_path / "a.jsonl"), tmp_path)

    assert re.search(r"a\.jsonl, row 3 is no JSON: Expecting", error(b"{"))
    assert "row 3: the field 'text' holds no text, but 7; the fields are text, id:" in error(b'{"text": 7, "id": 1}')
    assert "row 3: a row must be a JSON object with fields, but is a list" in error(b'["text"]')
    assert "row 3: there is no field 'text'; the fields are none" in error(b"{}")
    assert "row 3 is no JSON: maximum recursion depth" in error(b"[" * 100_000)
    assert "row 3 is no JSON: 'utf-8' codec" in error(b'{"text": "\xff"}')


def test_damaged_and_mixed_data_are_told(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no")
    assert "a.parquet is no Parquet file" in refusal(str(tmp_path / "a.parquet"), tmp_path)
    (tmp_path / "README.md").write_text("Read me.")
    mixed = refusal(str(tmp_path), tmp_path)
    assert re.search(r"text, such as .*README.md, beside rows, such as those of .*a.parquet", mixed)
    right = gzip.compress(b'{"text": "right"}\n' * 99)
    # cut off, and without the beginning of what is compressed
    for wrong in (right[:-9], right[:10] + b"\xff" * 8 + right[18:]):
        (tmp_path / "a.jsonl.gz").write_bytes(wrong)
        assert "a.jsonl.gz is damaged" in refusal(str(tmp_path / "a.jsonl.gz"), tmp_path)
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    assert "has several splits: name one of " in (told := refusal(str(tmp_path / "splits"), tmp_path))
    assert told.endswith("splits/train")
    assert "hub:no/such:de cannot be read" in refusal("hub:no/such:de", tmp_path)
    assert "must be hub:NAME[:CONFIG[:SPLIT]], but is hub:a:b:c:9" in refusal("hub:a:b:c:9", tmp_path)
    assert "there are no training data" in refusal(write(tmp_path, "saved", [""] * 3), tmp_path)


def test_damaged_shards_are_told(tmp_path):
    parts = write_data(Choice(paths=[write(tmp_path, "saved", TEXTS)]), Bytes(), tmp_path / "data", context=8)
    wrong = parts["training"] | {"documents": 3}
    with pytest.raises(CommandError, match=r"the data are damaged: .*training has \d+ tokens instead of"):
        open_data(tmp_path / "data", "training", wrong, "<u2")
    (file,) = (tmp_path / "data").rglob("*.arrow")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CommandError, match="are damaged"):
        open_data(tmp_path / "data", "training", parts["training"], "<u2")
    file.unlink()
    with pytest.raises(CommandError, match="there is no Arrow file"):
        open_data(tmp_path / "data", "training", parts["training"], "<u2")


def test_other_data_for_validation(tmp_path):
    (tmp_path / "held.txt").write_text("held out")
    choice = Choice(paths=[write(tmp_path, "saved", TEXTS)], validation_paths=[str(tmp_path / "held.txt")])
    parts = write_data(choice, Bytes(), tmp_path / "data", context=8)
    row = open_data(tmp_path / "data", "validation", parts["validation"], "<u2")
    assert bytes(row[1:].astype(np.uint8)) == b"held out"
    assert parts["training"]["documents"] == len(TEXTS) - 1
