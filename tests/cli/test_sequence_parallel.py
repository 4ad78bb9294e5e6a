"""Processes that share each sequence train what one process does, and a run goes on with any number of them."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linattn.cli.main import main
from linattn.cli.options import TrainOptions
from linattn.cli.processes import check_sharing, with_updates_of
from linattn.cli.run_folder import open_run
from linattn.console.errors import CommandError
from tests.cli.conftest import SHORT, TINY
from tests.cli.shard_on_cpus import shard_on_cpus
from tests.processes import needs_processes, run_in_group

OPTIONS = (*TINY, *SHORT, "--cpu", "--steps", "4", "--log-every", "1", "--save-every", "2", "--evaluate-every", "2")
# learned positions, and 7 windows for validation, a number that no batch divides
POSITIONS = ("--positions", "learned", "--evaluate-tokens", "224", "--accumulate", "2")
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}


def launch(size: int, folder: Path, *command: str, status: int = 0) -> str:
    """Run the command in a group of processes, and return what all report."""
    reports = [folder / f"report-{rank}" for rank in range(size)]
    run_in_group(size, main_of_group, reports, command, status)
    return "".join(report.read_text() for report in reports)


def main_of_group(rank: int, reports: list[Path], command: tuple[str, ...], status: int) -> None:
    size = str(len(reports))
    os.environ |= ON_CPUS | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    shard_on_cpus()
    with reports[rank].open("w") as report, contextlib.redirect_stderr(report):
        try:
            ended = main(command)
        except SystemExit as error:
            ended = error.code
        assert ended == status, reports[rank].read_text()


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("shared") / "alone"
    assert main(["train", str(text), "--out", str(run), *OPTIONS, *POSITIONS]) == 0
    return run


def assert_same_run(run: Path, alone: Path) -> None:
    ours, theirs = load_file(run / "model.safetensors"), load_file(alone / "model.safetensors")
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    clock = ("seconds", "tokens_per_second")
    for record, other in zip(open_run(run).records(), open_run(alone).records(), strict=True):
        assert record.keys() == other.keys()
        for name in record.keys() - set(clock):
            assert record[name] == pytest.approx(other[name], rel=1e-4), (name, record)


@needs_processes
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, ["--sequence-parallel", "2"]),
        (2, ["--sequence-parallel", "2", "--checkpointing"]),
        (2, ["--sequence-parallel", "2", "--fsdp"]),
        (4, ["--sequence-parallel", "2", "--batch", "2"]),
    ],
)
def test_processes_that_share_sequences_are_one(text, alone, tmp_path, size, options):
    run = tmp_path / "run"
    report = launch(size, tmp_path, "train", str(text), "--out", str(run), *OPTIONS, *POSITIONS, *options)
    assert_same_run(run, alone)
    assert report.count("each sequence over 2 processes") == report.count("is complete") == 1
    assert report.count("256 tokens per step") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sequence-parallel", "2"], "--sequence-parallel 2 must divide the number of processes, but there are 1"),
        (["--sequence-parallel", "2", "--segment", "8"], "--segment does not work with --sequence-parallel"),
    ],
)
def test_what_cannot_be_shared_is_refused(text, tmp_path, capsys, options, message):
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *OPTIONS, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_numbers_that_do_not_go_together_are_refused():
    options = TrainOptions(batch=4, accumulate=3, context=33, sequence_parallel=2)
    with pytest.raises(ValueError, match="--sequence-parallel 2 must divide --context, but that is 33"):
        check_sharing(options, 4)
    # 24 sequences: 2 groups of 2 processes, 3 batches of 4 each
    assert with_updates_of(options, 24, 2, None).accumulate == 6
    assert with_updates_of(options, 24, 4, 3).accumulate == 3
    for processes, accumulate, message in [
        (10, None, "10 processes with --batch 4 take another number: choose 2, 4, 6 or 12 processes"),
        (16, None, "choose 2, 4, 6 or 12 processes, or --batch 1 or 3"),
        (4, 2, "4 processes with --batch 4 and --accumulate 2 take another number: choose 6 processes, or --batch"),
        (4, 5, "take another number: choose other numbers"),
    ]:
        with pytest.raises(CommandError, match=message):
            with_updates_of(options, 24, processes, accumulate)


def begun(run: Path, alone: Path) -> None:
    """Copy the run as it was after step 2."""
    shutil.copytree(alone, run)
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    description = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(description | {"finished": None}))


@needs_processes
@pytest.mark.parametrize("options", [[], ["--sequence-parallel", "2"]])
def test_a_run_goes_on_with_another_number_of_processes(alone, tmp_path, options):
    run = tmp_path / "run"
    begun(run, alone)
    assert "from step 2" in launch(2, tmp_path, "train", "--out", str(run), "--resume", *options)
    assert_same_run(run, alone)
