"""What a run is."""

import json
import shutil

import pytest

from linattn.cli.main import main
from linattn.models import LanguageModel
from linattn.states import describe_state
from tests.cli.conftest import SHORT, TINY


def facts(capsys, run) -> dict:
    capsys.readouterr()
    assert main(["info", str(run), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_says_what_the_run_is(finished, text, capsys):
    found = facts(capsys, finished)
    assert found["paths"] == [str(text)]
    assert found["checkpoints"] == [4, 8]
    assert found["progress"]["step"] == 8
    assert found["model"]["configuration"] == LanguageModel.load(finished).config.to_dict()
    parameters = sum(parameter.numel() for parameter in LanguageModel.load(finished).parameters())
    assert found["model"]["parameters"] == parameters
    assert found["options"]["lr"] == 5e-3


def test_the_text_has_the_same_facts(finished, text, capsys):
    assert main(["info", str(finished)]) == 0
    shown = capsys.readouterr().out
    progress = facts(capsys, finished)["progress"]
    for fact in (
        str(text),
        "bytes in 2 documents,",
        "bytes in 1 document,",
        "attention local+elu",
        "step 8,",
        f"validation {progress['validation_bits_per_byte']:.3f} bits/byte",
        f"best {progress['best_validation_bits_per_byte']:.3f} at step {progress['best_step']}",
        "torch 2.",
        "lr 0.005",
        "checkpoints  4, 8",
        "bytes per sequence, however long it gets",
    ):
        assert fact in shown


def test_best_and_last_validation_differ(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    with open(run / "log.jsonl", "a") as log:
        log.write('{"step": 9, "tokens": 1, "seconds": 1, "validation_bits_per_byte": 9.5}\n')
    progress = facts(capsys, run)["progress"]
    assert (progress["validation_bits_per_byte"], progress["best_step"]) == (9.5, 8)


@pytest.mark.parametrize(
    "attention, grows",
    [("local", False), ("elu", False), ("local+elu", False), ("softmax", True), ("elu+softmax", True)],
)
def test_the_state_is_constant_but_for_softmax(text, tmp_path, capsys, attention, grows):
    run = tmp_path / "run"
    assert main(["train", str(text), "--out", str(run), *TINY, *SHORT, "--steps", "1", "--attention", attention]) == 0
    model = facts(capsys, run)["model"]
    assert model["state_bytes"] > 0
    assert (model["state_bytes_per_further_token"] > 0) == grows


def test_a_run_of_an_older_version_is_described(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    description = json.loads((run / "run.json").read_text())
    del description["launch"]
    (run / "run.json").write_text(json.dumps(description))
    assert facts(capsys, run).keys() == facts(capsys, finished).keys() - {"launch"}


def test_a_run_that_has_just_begun_has_no_model(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints")
    for name in ("log.jsonl", "config.json", "model.safetensors"):
        (run / name).unlink()
    found = facts(capsys, run)
    assert (found["model"], found["progress"], found["checkpoints"]) == (None, {}, [])
    assert main(["info", str(run)]) == 0


def test_a_run_without_checkpoints_has_its_model(finished, tmp_path, capsys):
    """They are for --resume alone, and may be deleted."""
    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    assert facts(capsys, run)["model"] == facts(capsys, finished)["model"]


def test_a_state_in_a_file_is_described(finished, text, tmp_path, capsys):
    out = tmp_path / "book.state"
    assert main(["read", str(finished), str(text / "a.txt"), "--out", str(out)]) == 0
    found = facts(capsys, out)
    expected = {**describe_state(out)._asdict(), "file": str(out), "file_bytes": out.stat().st_size}
    # JSON has lists
    assert found == json.loads(json.dumps(expected))
    assert main(["info", str(out)]) == 0
    shown = capsys.readouterr().out
    for fact in (f"{found['num_tokens']:,} tokens", f"{found['file_bytes']:,} bytes", "1 row after", found["weights"]):
        assert fact in shown


def test_a_file_that_is_no_state_is_refused(text, capsys):
    assert main(["info", str(text / "a.txt")]) == 2
    assert "no state" in capsys.readouterr().err
