"""The script measures every map, on the queries and keys of a run or of a model that it trains."""

import json

import pytest
import torch

from benchmarks import feature_map_errors
from benchmarks.feature_map_errors import FIXED, RANDOM, main, measure
from linattn.cli.main import main as linattn

TINY = "--precision float32 --dim 16 --depth 1 --num-heads 2 --attention softmax --convolution 0"
SHORT = "--context 32 --batch 4 --steps 2 --validation-part 0.5"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("the cat sees a tree and runs over the hill.\n" * 200)
    return path


def run_script(monkeypatch, path, *options):
    monkeypatch.setattr(feature_map_errors, "COUNTS", (16,))
    monkeypatch.setattr("sys.argv", ["feature_map_errors.py", "--json", str(path), *map(str, options)])
    main()
    return json.loads(path.read_text())


@pytest.mark.parametrize("model", [True, False], ids=["run", "trained here"])
def test_every_feature_map_has_an_error(model, text, tmp_path, monkeypatch, capsys):
    options = ("--text", text, "--minutes", "0.01")
    if model:
        run = tmp_path / "run"
        assert linattn(["train", str(text), "--out", str(run), *TINY.split(), *SHORT.split()]) == 0
        options = ("--model", run)
    found = run_script(monkeypatch, tmp_path / "a.json", *options)
    assert [each["feature_map"] for each in found] == ["uniform attention", *FIXED, *RANDOM]
    assert all(len(each["values"]) == (3 if each["feature_map"] in RANDOM else 1) for each in found)
    shown = capsys.readouterr().out
    assert all(each["feature_map"] in shown for each in found)


def test_random_features_have_the_same_error_each_time(monkeypatch):
    monkeypatch.setattr(feature_map_errors, "COUNTS", (16,))
    layers = [tuple(torch.randn(3, 1, 2, 20, 8))]
    one, other = (list(measure(layers)) for _ in range(2))
    assert one == other and len(one) == 1 + len(FIXED) + len(RANDOM)


def test_a_short_text_is_told(text, tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("short")
    run = tmp_path / "run"
    assert linattn(["train", str(text), "--out", str(run), *TINY.split(), *SHORT.split()]) == 0
    with pytest.raises(SystemExit, match="there must be 256 tokens of text, but there are 5"):
        run_script(monkeypatch, tmp_path / "a.json", "--model", run, "--text", tmp_path / "short.txt")
