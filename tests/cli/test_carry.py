"""With --carry, sequences go on from states: of one process or several, in one go or after a break."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from linattn.states import describe_state
from tests.cli.conftest import SHORT, TINY
from tests.cli.test_sharing import assert_same_run, launch
from tests.processes import needs_processes

OPTIONS = (*TINY, *SHORT, "--cpu", "--carry", "0.8", "--accumulate", "2", "--save-every", "2", "--keep", "4")


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("carry") / "alone"
    assert main(["train", str(text), "--out", str(run), *OPTIONS]) == 0
    return run


def broken_off(run: Path, complete: Path, *lost: int) -> Path:
    """Copy a run as it was before the checkpoints of the steps in `lost`."""
    shutil.copytree(complete, run)
    for step in lost:
        shutil.rmtree(run / "checkpoints" / f"checkpoint-{step}")
    description = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(description | {"finished": None}))
    return run


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def test_what_is_learned_depends_on_the_past(text, alone, tmp_path):
    """The same windows, of which none continues another, teach something else."""
    run = tmp_path / "run"
    assert main(["train", str(text), "--out", str(run), *OPTIONS, "--carry", "1e-9"]) == 0
    assert weights(run) != weights(alone)


@pytest.mark.parametrize(
    "options",
    [
        ("--dropout", "0.2"),
        ("--segment", "12"),
        ("--precision", "bfloat16"),
        ("--optimizer", "muon"),
    ],
)
def test_a_run_that_is_resumed_is_the_run_without_a_break(text, tmp_path, options):
    run = tmp_path / "run"
    assert main(["train", str(text), "--out", str(run), *OPTIONS, *options]) == 0
    again = broken_off(tmp_path / "again", run, 6, 8)
    assert main(["train", "--resume", "--out", str(again)]) == 0
    assert weights(again) == weights(run)


def test_segments_are_whole_windows(text, alone, tmp_path):
    run = tmp_path / "run"
    assert main(["train", str(text), "--out", str(run), *OPTIONS, "--segment", "12"]) == 0
    torch.testing.assert_close(*(load_file(x / "model.safetensors") for x in (run, alone)), rtol=1e-3, atol=1e-5)


@needs_processes
def test_processes_go_on_with_the_states_of_other_numbers_of_processes(alone, tmp_path):
    """One process until step 4, two until step 6, and one until step 8 train what one does."""
    two = broken_off(tmp_path / "two", alone, 6, 8)
    launch(2, tmp_path, ["train", "--resume", "--out", str(two), "--batch", "2"])
    assert_same_run(two, alone)
    one = broken_off(tmp_path / "one", two, 8)
    assert len(list(open_run(one).checkpoint(6).glob("state-*"))) == 2
    assert main(["train", "--resume", "--out", str(one)]) == 0
    assert_same_run(one, alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attention", "softmax"], "--carry needs a state of constant size, but that of SoftmaxAttention grows"),
        (["--positions", "learned"], "--carry needs a model without learned positions, but these end at 32"),
        (["--checkpointing"], "--carry does not work with --checkpointing"),
        (["--fsdp"], "--carry does not work with --fsdp"),
        (["--sequence-parallel", "2"], "--carry does not work with --sequence-parallel"),
        (["--carry", "1.5"], "must be a number above 0 and at most 1, but is '1.5'"),
    ],
)
def test_what_cannot_go_on_is_refused(text, tmp_path, capsys, options, message):
    try:
        status = main(["train", str(text), "--out", str(tmp_path / "run"), *OPTIONS, *options])
    except SystemExit as error:
        status = error.code
    assert status == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_checkpoints_hold_a_state_per_sequence(alone):
    (file,) = open_run(alone).checkpoint(8).glob("state-*")
    assert describe_state(file).rows == 8
