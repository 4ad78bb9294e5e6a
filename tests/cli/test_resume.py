"""However a run was broken off, going on gives the weights of the run that was not: every bit of them."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from linattn.data.windows import TrainingWindows
from linattn.models import LanguageModel
from tests.cli.conftest import SHORT, TINY, sentences

# dropout draws random numbers, and an update takes two batches
OPTIONS = (*TINY, *SHORT, "--dropout", "0.2", "--accumulate", "2")
SEQUENCES = 8
"""Of one update."""


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("resume") / "uninterrupted"
    assert main(["train", str(text), "--out", str(run), *OPTIONS]) == 0
    return run


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, happens) -> None:
    """When the data of a step are read, something happens."""
    read = TrainingWindows.__getitem__

    def read_and(self, index):
        if index == (step - 1) * SEQUENCES + 1:
            happens()
        return read(self, index)

    monkeypatch.setattr(TrainingWindows, "__getitem__", read_and)


def crash() -> None:
    raise ZeroDivisionError


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def outcome(run: Path) -> tuple:
    """The weights, and the log but for how long things took."""
    clock = ("seconds", "tokens_per_second")
    records = [{name: x for name, x in record.items() if name not in clock} for record in open_run(run).records()]
    return (run / "model.safetensors").read_bytes(), records


def test_a_crash_is_made_good(text, uninterrupted, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 8, crash)
        with pytest.raises(ZeroDivisionError):
            main(["train", str(text), "--out", str(run), *OPTIONS])
    # the log had come to step 6, further than the last checkpoint
    assert open_run(run).saved_steps() == [4]
    assert [record["step"] for record in open_run(run).records()][-1] == 6
    with open(run / "log.jsonl", "a") as log:
        log.write('{"step": 7, "trai')
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert outcome(run) == outcome(uninterrupted)


def test_a_run_on_rows_goes_on_at_its_place_without_their_file(tmp_path, monkeypatch):
    rows, runs = tmp_path / "rows.jsonl", [tmp_path / "whole", tmp_path / "run"]
    rows.write_text("".join(json.dumps({"body": line}) + "\n" for line in sentences(200).splitlines()))
    arguments = (str(rows), "--field", "body", *OPTIONS)
    assert main(["train", "--out", str(runs[0]), *arguments]) == 0
    with monkeypatch.context() as patch:
        at_step(patch, 8, crash)
        with pytest.raises(ZeroDivisionError):
            main(["train", "--out", str(runs[1]), *arguments])
    rows.unlink()
    assert main(["train", "--resume", "--out", str(runs[1])]) == 0
    assert outcome(runs[1]) == outcome(runs[0])


def test_a_run_in_segments_is_the_run_without_them(text, finished, tmp_path, monkeypatch, capsys):
    """Also when it was broken off: the length of the segments belongs to the run. 32 tokens are 12, 12 and 8."""
    run, arguments, lengths = tmp_path / "run", (str(text), *TINY, *SHORT, "--segment", "12"), set()
    extend = LanguageModel.extend_hidden

    def counted(self, tokens, *others, **options):
        lengths.add(tokens.shape[1])
        return extend(self, tokens, *others, **options)

    with monkeypatch.context() as patch:
        at_step(patch, 4, crash)
        with pytest.raises(ZeroDivisionError):
            main(["train", "--out", str(run), *arguments])
    assert main(["train", "--resume", "--out", str(run), "--segment", "8"]) == 2
    assert "began with --segment 12, so it cannot go on with 8" in capsys.readouterr().err
    monkeypatch.setattr(LanguageModel, "extend_hidden", counted)
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert lengths >= {12, 8} and max(lengths) == 12
    weights = [load_file(folder / "model.safetensors") for folder in (run, finished)]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)
    name = "validation_bits_per_byte"
    bits = [[record[name] for record in open_run(x).records() if name in record] for x in (run, finished)]
    assert len(bits[0]) == 2 and bits[0] == pytest.approx(bits[1], rel=1e-4)


def test_a_crash_before_the_first_checkpoint_is_made_good(text, uninterrupted, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 4, crash)
        with pytest.raises(ZeroDivisionError):
            main(["train", str(text), "--out", str(run), *OPTIONS])
    assert open_run(run).saved_steps() == []
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert outcome(run) == outcome(uninterrupted)


@pytest.mark.parametrize("signalled", [interrupt, terminate])
def test_an_interrupted_run_is_saved(text, uninterrupted, tmp_path, monkeypatch, capsys, signalled):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 6, signalled)
        assert main(["train", str(text), "--out", str(run), *OPTIONS]) == 130
    # the data of a step are read one step ahead
    (saved,) = set(open_run(run).saved_steps()) - {4}
    assert saved in (5, 6)
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        last
        == f"linattn train: interrupted after step {saved}, which is saved; linattn train --resume --out {run} goes on"
    )
    assert open_run(run).description["finished"] is None
    assert main(["train", "--resume", "--out", str(run)]) == 0
    weights, records = outcome(run)
    assert weights == outcome(uninterrupted)[0]
    validated = [record for record in records if "validation_bits_per_byte" in record]
    assert validated == [record for record in outcome(uninterrupted)[1] if "validation_bits_per_byte" in record]


@pytest.mark.parametrize("signalled", [interrupt, terminate])
@pytest.mark.parametrize("moment", ["prepare.write_data", "training._train", "schedule.Schedule.on_train_begin"])
def test_before_the_first_step_an_interrupt_does_not_wait(text, tmp_path, monkeypatch, capsys, signalled, moment):
    monkeypatch.setattr(f"linattn.cli.{moment}", lambda *_, **__: signalled())
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *OPTIONS]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "linattn train: interrupted"
    # a run that has its data can begin with --resume
    assert sorted(path.name for path in tmp_path.iterdir()) == ([] if "data" in moment else ["run"])


def test_the_second_interrupt_does_not_wait(text, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    monkeypatch.setattr("linattn.cli.schedule.ECHO_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        at_step(patch, 6, lambda: (interrupt(), interrupt()))
        assert main(["train", str(text), "--out", str(run), *OPTIONS]) == 130
    assert open_run(run).saved_steps() == [4]
    assert capsys.readouterr().err.splitlines()[-1] == "linattn train: interrupted"
    # a signal that is repeated at once is one interrupt; the data of step 6 are read before the first step, 5
    at_step(monkeypatch, 7, lambda: (interrupt(), interrupt()))
    monkeypatch.setattr("linattn.cli.schedule.ECHO_SECONDS", 60.0)
    assert main(["train", "--resume", "--out", str(run)]) == 130
    assert len(open_run(run).saved_steps()) == 2


def test_handlers_are_put_back(uninterrupted, text, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *OPTIONS]) == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_checkpoint_half_written_is_none(text, uninterrupted, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 8, crash)
        with pytest.raises(ZeroDivisionError):
            main(["train", str(text), "--out", str(run), *OPTIONS])
    half = run / "checkpoints" / ".checkpoint.partial" / "checkpoint-6"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert outcome(run) == outcome(uninterrupted)
    assert not half.exists()


def test_a_complete_run_stays_as_it_is(uninterrupted, capsys):
    before = outcome(uninterrupted)
    assert main(["train", "--resume", "--out", str(uninterrupted)]) == 0
    assert outcome(uninterrupted) == before
    assert "is complete" in capsys.readouterr().err


@pytest.fixture
def broken_off(text, tmp_path, monkeypatch) -> Path:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 8, crash)
        with pytest.raises(ZeroDivisionError):
            main(["train", str(text), "--out", str(run), *OPTIONS, "--save-every", "2"])
    assert open_run(run).saved_steps() == [4, 6]
    return run


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "trainer_state.json", "rng_state.pth"])
def test_a_damaged_checkpoint_is_noticed(broken_off, capsys, name):
    file = broken_off / "checkpoints" / "checkpoint-6" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = outcome(broken_off)
    assert main(["train", "--resume", "--out", str(broken_off)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoint-6 is damaged" in line and name in line and "goes on from step 4" in line
    assert outcome(broken_off) == before


def test_options_may_be_repeated_but_not_changed(broken_off, capsys):
    for given, began, after in (
        (("--lr", "1e-4"), "with --lr 0.005", "0.0001"),
        (("--minutes", "3"), "without --minutes", "3.0"),
        (("--cpu",), "without --cpu", "True"),
        (("--include", "a"), "without --include", "a"),
        (("--convolution", "0"), "with --convolution 2", "0"),
    ):
        assert main(["train", "--resume", "--out", str(broken_off), *given]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"linattn train: the run began {began}, so it cannot go on with {after}"
    # what the weights do not depend on may change
    reports = ("--log-every", "1", "--save-every", "1", "--keep", "2")
    assert main(["train", "--resume", "--out", str(broken_off), "--lr", "5e-3", *reports]) == 0
    run = open_run(broken_off)
    assert run.saved_steps() == [7, 8]
    assert {7, 8} <= {record["step"] for record in run.records() if "learning_rate" in record}
