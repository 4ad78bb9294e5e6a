"""Positions are counted from the beginning of a document, and a short past is a short one."""

import json
import math
import random
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from examples.learning import positions
from examples.learning.run import append, read
from linattn import LanguageModel, LanguageModelConfig


def model(attention: str = "elu", **options) -> LanguageModel:
    fields = {"vocab_size": 257, "dim": 16, "depth": 1, "num_heads": 2, "attention": attention, **options}
    own = LanguageModel(LanguageModelConfig(**fields)).eval()
    with torch.no_grad():
        # so large that the past shows in the logits
        for weight in own.parameters():
            weight.mul_(15 if weight.dim() > 1 else 1)
    return own


def bits(model, tokens):
    with torch.no_grad():
        return F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none") / math.log(2)


def test_a_document_is_read_whole():
    own, tokens = model(), torch.randint(257, (300,))
    assert_close(positions.bits_of(own, tokens, piece=64), bits(own, tokens))


def test_a_short_past_is_cut_off():
    own, tokens = model(), torch.randint(257, (1200,))
    short = positions.bits_after_short_past(own, tokens, [300, 700]).view(2, 256)
    for row, start in zip(short, (300, 700), strict=True):
        assert_close(row, bits(own, tokens[start - 256 : start + 256])[-256:])


def test_a_window_loses_nothing_by_a_short_past_and_a_sum_does():
    texts = [torch.randint(256, (5000,)) for _ in range(2)]
    ranges = positions.measure(model("local", window=8), texts, 65_536)
    assert [(x["from"], x["to"], x["bytes"]) for x in ranges] == [
        (0, 256, 512),
        (256, 1024, 1536),
        (1024, 4096, 6144),
        (4096, 16384, 2 * 903),
    ]
    assert [x["short_past"] for x in ranges[2:]] == pytest.approx([0, 0], abs=1e-4)
    own = model("elu")
    ranges, expected = positions.measure(own, texts, 65_536), torch.cat([bits(own, text)[256:1024] for text in texts])
    assert ranges[1]["bits"] == pytest.approx(float(expected.mean()), abs=1e-3)
    assert ranges[2]["short_past"] != pytest.approx(0, abs=1e-3)


def test_a_passage_is_read_again_after_another_document(monkeypatch):
    monkeypatch.setattr(positions, "GAPS", (20, 100, 300))
    texts = [torch.cat([torch.tensor([256]), torch.randint(256, (400,))]) for _ in range(2)]
    own, passages = model("elu"), [text[200:328] for text in texts[::-1]]
    found = positions.repeats(own, texts, 200)
    assert [each["gap"] for each in found] == [20, 100]
    for each in found:
        again, first = (
            torch.cat(
                [
                    bits(own, torch.cat([text[:1], *before, text[1 : each["gap"] + 1], passage]))[-128:]
                    for text, passage, before in zip(texts, passages, pasts, strict=True)
                ]
            ).mean()
            for pasts in ([(passage,) for passage in passages], [(), ()])
        )
        assert each["saved"] == pytest.approx(float(first - again), abs=1e-3) and each["saved"] != 0
    # the first reading is outside the window
    assert [each["saved"] for each in positions.repeats(model("local", window=8), texts, 200)] == [0, 0]


def test_a_run_becomes_a_line_a_row_and_a_curve(tmp_path, monkeypatch):
    """What the file has is not run again."""
    files = [tmp_path / f"{i}.py" for i in range(3)]
    for i, file in enumerate(files):
        file.write_bytes(bytes(range(32, 127)) * (200 + i))
    monkeypatch.setattr(positions, "split", lambda: (files[:2], files[2:]))
    monkeypatch.setattr(positions, "SIZES", "--dim 16 --num-heads 4 --window 8 --precision float32")
    monkeypatch.setattr(positions, "BATCH", 512)
    # as folders may have names of several words
    (tmp_path / "of this test").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of this test"))
    out, page, threads = tmp_path / "runs.jsonl", tmp_path / "page.md", torch.get_num_threads()
    page.write_text("before\n<!-- table positions -->\n<!-- end -->\nafter\n")
    arguments = ["--method", "local+elu", "--depth", "1", "--steps", "1", "--carry", "0", "0.9", "--out", str(out)]
    positions.main([*arguments, "--page", str(page)])
    records = read(out)
    assert [(record["carry"], len(record["ranges"])) for record in records] == [(0, 5), (0.9, 5)]
    assert all([x["gap"] for x in record["repeats"]] == [64, 1024, 4096, 16_384] for record in records)
    # in segments, the gradients and so the figures are the same
    command, given = positions.linattn, []
    monkeypatch.setattr(positions, "linattn", lambda words: given.extend(words) or command(words))
    positions.main([*arguments[:-4], "0.9", "--segment", "64", "--out", str(out)])
    assert "--segment 64" in " ".join(given) and "--carry 0.9" in " ".join(given)
    segments = read(out)[-1]
    assert segments["segment"] == 64 and len(read(out)) == 3
    for cut, whole in zip(segments["ranges"], records[1]["ranges"], strict=True):
        assert cut["bits"] == pytest.approx(whole["bits"], abs=2e-3)
    # with names of their own, the same files are another text, with a table of its own
    seen = []
    monkeypatch.setattr(positions, "linattn", lambda words: seen.extend(Path(words[1]).read_bytes()) or command(words))
    for file in files:
        file.write_bytes(b"import letters\n" * 2_000)
    positions.main([*arguments[:-4], "0.9", "--renamed", "--out", str(out)])
    assert bytes(seen[:7]) == b"import " and bytes(seen[7:14]) != b"letters"
    assert bytes(seen[22:29]) == bytes(seen[7:14])
    kept, (other,) = positions.texts_of(read(out)).values()
    assert len(kept) == 3 and other["renamed"] is True
    written = positions.with_tables(
        "<!-- table positions -->\n<!-- end -->\n<!-- table positions-renamed -->\n<!-- end -->", read(out)
    )
    assert written.split("<!-- end -->")[1].strip().splitlines()[1:] == positions.table([other]).splitlines()
    out.write_text("".join(json.dumps(record) + "\n" for record in kept))
    # the same run with more updates, and two that no picture shows
    append(out, records[0] | {"steps": 2_000})
    append(out, records[0] | {"context": 512})
    append(out, records[0] | {"lr": 0.5, "ranges": [each | {"bits": 77.0} for each in records[0]["ranges"]]})
    monkeypatch.setattr(positions, "train", lambda *_: pytest.fail("run twice"))
    positions.main([*arguments, "--page", str(page)])
    torch.set_num_threads(threads)
    head, _, first, second, *others = [line.split(" | ") for line in page.read_text().splitlines()[2:10]]
    assert head[5:8] == ["0–256", "256–1 k", "1 k–4 k"] and "past, 1 k–4 k" in head
    assert head[-5:-1] == ["again after 64", "again after 1 k", "again after 4 k", "again after 16 k"]
    assert [float(cell) for cell in first[-5:-1]] == pytest.approx(
        [x["saved"] for x in records[0]["repeats"]], abs=6e-4
    )
    assert first[1:5] == ["1", "256", "0.005", ""] and float(first[5]) > 5
    assert second[1:5] == ["1", "256", "0.005", "0.9"]
    rows = [["1", "256", "0.5", ""], ["1", "256 (64)", "0.005", "0.9"], ["1", "512", "0.005", ""]]
    assert [row[1:5] for row in others] == [*rows, ["2,000", "256", "0.005", ""]] and others[0][5] == "77.000"
    picture = (tmp_path / "page-positions.svg").read_text()
    assert ">local+elu<" in picture and ">local+elu, 2,000 updates<" in picture
    # the tick of an axis that reaches them
    assert ">40<" not in picture and ">60<" not in picture


def test_the_demos_files_are_split():
    training, held_out = positions.split()
    assert len(training) > 9 * len(held_out) > 0 and not set(training) & set(held_out)


def test_a_renamed_file_has_other_names_and_is_the_same_code():
    source = """
import argparse as ap

class DataFile(dict):
    '''A DataFile has lines; the file is closed.  Übung'''
    def __init__(self, file, x2=None, file_name=b"file"):
        self.file, self.x2 = file, x2  # the file
        print(len(file_name), DataFile, ap.__doc__, 0xfeed, "text")
"""
    text = positions.renamed(source.encode(), random.Random(1)).decode()
    words, old = re.findall(r"\w+", text), re.findall(r"\w+", source)
    chosen = dict(zip(old, words, strict=True))
    changed = {a for a, b in chosen.items() if a != b}
    assert changed == {"argparse", "DataFile", "file", "file_name"}
    # everywhere alike, no two alike, as long, and in the same style
    assert [chosen[word] for word in old] == words and len(set(chosen.values())) == len(chosen)
    assert all(re.fullmatch(re.sub("[a-z]", "[a-z]", re.sub("[A-Z]", "[A-Z]", a)), chosen[a]) for a in changed)
    back = {b: a for a, b in chosen.items()}
    assert re.sub(r"\w+", lambda word: back[word[0]], text) == source
    assert positions.renamed(source.encode(), random.Random(2)).decode() != text


def test_no_two_files_have_the_same_made_up_names(tmp_path):
    file = tmp_path / "a.py"
    file.write_bytes(b"import something\nsomething.other()\n")
    paths = [
        *positions.renamed_files([file, file], tmp_path / "one"),
        *positions.renamed_files([file], tmp_path / "two"),
    ]
    texts = [path.read_bytes() for path in paths]
    assert len({*texts, file.read_bytes()}) == 4 and {len(text) for text in texts} == {len(file.read_bytes())}


def test_no_two_curves_of_a_picture_look_alike(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("examples.pictures.save", lambda figure, path: figures.append(figure))
    ranges = [{"from": 0, "to": 256, "bits": 2.0}, {"from": 256, "to": 1_024, "bits": 1.5, "short_past": 0.1}]
    kinds = [("hybrid", 600, 256), ("softmax", 600, 256), *(("hybrid", 12_000, context) for context in (512, 1_024))]
    runs = [
        {"method": method, "steps": steps, "context": context, "carry": carry, "seed": 0, "lr": positions.RATE}
        | {"ranges": ranges, "repeats": [{"gap": 64, "saved": 0.2}]}
        for method, steps, context in kinds
        for carry in (0.0, 0.9)
    ]
    positions.draw(runs, tmp_path / "x.svg")
    curves = [line for line in figures[0].axes[0].lines if list(line.get_xdata()) == ["0–256", "256–1 k"]]
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in curves]
    assert len(set(looks)) == len(looks) == len(runs)
    named = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert len(set(named)) == len(named) == len(kinds)
