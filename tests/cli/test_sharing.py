"""Processes that share the sequences, the layers or the weights of a run train what one process does, and the run goes
on with any number of them."""

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linattn.cli.main import main
from linattn.cli.options import TrainOptions
from linattn.cli.run_folder import open_run
from linattn.cli.sharing import check_sharing, with_updates_of
from linattn.console.errors import CommandError
from tests.cli.conftest import SHORT, TINY
from tests.processes import needs_processes, run_in_group

# two heads of each kind, learned positions, and 7 windows for validation, a number that no batch divides
OPTIONS = (*TINY, "--num-heads", "4", *SHORT, "--cpu", "--steps", "4", "--log-every", "1", "--save-every", "2")
OPTIONS += ("--evaluate-every", "2", "--positions", "learned", "--evaluate-tokens", "224", "--accumulate", "2")
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
SEQUENCE, TENSOR = ("--sequence-parallel", "2"), ("--tensor-parallel", "2")
# for each number of processes: --batch is such that an update has the sequences that it has in one process
RUNS = {
    2: {
        "data": ("--batch", "2"),
        "weights": ("--batch", "2", "--fsdp"),
        "sequence": (*SEQUENCE, "--checkpointing"),
        "layers": TENSOR,
    },
    4: {
        "data, sequence": ("--batch", "2", *SEQUENCE),
        "data, layers": ("--batch", "2", *TENSOR),
        "weights, sequence, layers": (*SEQUENCE, *TENSOR, "--fsdp"),
    },
}
# runs that are broken off after step 2, and how they go on with another number of processes
RESUMED = {
    2: {
        "alone": {"data": ("--batch", "2"), "sequence": SEQUENCE, "layers": TENSOR, "weights": ("--fsdp",)},
    },
    4: {
        "weights": {"weights, layers": ("--batch", "2", *TENSOR)},
        "layers": {"sequence, layers": SEQUENCE},
    },
}


def launch(size: int, folder: Path, *commands: Sequence[str], status: int = 0) -> list[str]:
    """Run the commands one after the other in a group of processes, and return what all processes print of each."""
    reports = [[folder / f"report-{i}-{rank}" for rank in range(size)] for i in range(len(commands))]
    run_in_group(size, main_of_group, reports, commands, status)
    return ["".join(report.read_text() for report in each) for each in reports]


def main_of_group(rank: int, reports: list[list[Path]], commands: Sequence[Sequence[str]], status: int) -> None:
    size = str(len(reports[0]))
    os.environ |= ON_CPUS | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    for each, command in zip(reports, commands, strict=True):
        with each[rank].open("w") as report, contextlib.redirect_stderr(report), contextlib.redirect_stdout(report):
            try:
                ended = main(command)
            except SystemExit as error:
                ended = error.code
            assert ended == status, each[rank].read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def alone(text: Path, runs: Path) -> Path:
    assert main(["train", str(text), "--out", str(runs / "alone"), *OPTIONS]) == 0
    return runs / "alone"


@pytest.fixture(scope="module")
def of_two(text: Path, alone: Path) -> dict[str, str]:
    return train_all(2, text, alone.parent)


@pytest.fixture(scope="module")
def of_four(text: Path, of_two: dict[str, str], alone: Path) -> dict[str, str]:
    return train_all(4, text, alone.parent)


def train_all(size: int, text: Path, runs: Path) -> dict[str, str]:
    """Train, and go on, as the tables say; return what was reported of each run, which is in the folder of its name."""
    commands = {
        name: ["train", str(text), "--out", str(runs / name), *OPTIONS, *options]
        for name, options in RUNS[size].items()
    }
    for before, ways in RESUMED[size].items():
        for after, options in ways.items():
            name = f"{before}, then {after}"
            broken_off(runs / before, runs / name)
            commands[name] = ["train", "--resume", "--out", str(runs / name), *options]
    folder = runs / f"reports of {size}"
    folder.mkdir()
    return dict(zip(commands, launch(size, folder, *commands.values()), strict=True))


def broken_off(run: Path, copy: Path) -> None:
    """Copy the run as it was after step 2."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "checkpoint-4")
    description = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(description | {"finished": None}))


def assert_same_run(run: Path, alone: Path) -> None:
    ours, theirs = load_file(run / "model.safetensors"), load_file(alone / "model.safetensors")
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert json.loads((run / "config.json").read_text()) == json.loads((alone / "config.json").read_text())
    clock = ("seconds", "tokens_per_second")
    for record, other in zip(open_run(run).records(), open_run(alone).records(), strict=True):
        assert record.keys() == other.keys()
        for name in record.keys() - set(clock):
            assert record[name] == pytest.approx(other[name], rel=1e-4), (name, record)


def assert_one_report(report: str, name: str) -> None:
    """One process reports, and says what is shared."""
    assert report.count("256 tokens per step") == report.count("is complete") == 1
    for what in ("sequence", "weights", "layer"):
        shared = sum(report.count(f"{article} {what} over") for article in ("each", "the"))
        assert shared == (what in name.rpartition("then ")[2]), report


def resumed(size: int) -> list[str]:
    return [f"{before}, then {after}" for before, ways in RESUMED[size].items() for after in ways]


@needs_processes
@pytest.mark.parametrize("name", [*RUNS[2], *resumed(2)])
def test_two_processes_are_one(of_two, alone, name):
    assert_same_run(alone.parent / name, alone)
    assert_one_report(of_two[name], name)
    assert ("from step 2" in of_two[name]) == ("then" in name)


@needs_processes
@pytest.mark.parametrize("name", [*RUNS[4], *resumed(4)])
def test_four_processes_are_one(of_four, alone, name):
    assert_same_run(alone.parent / name, alone)
    assert_one_report(of_four[name], name)
    assert ("from step 2" in of_four[name]) == ("then" in name)


@needs_processes
@pytest.mark.parametrize("name", ["weights", "layers"])
def test_one_process_goes_on_with_what_several_have_shared(of_two, alone, tmp_path, capsys, name):
    """Their checkpoint has a part of the optimizer from each, and is noticed if it is damaged."""
    run = tmp_path / "run"
    broken_off(alone.parent / name, run)
    resume = ["train", "--resume", "--out", str(run), "--no-fsdp", "--tensor-parallel", "1", "--batch", "4"]
    parts = sorted((run / "checkpoints" / "checkpoint-2" / "optimizer").glob("*.distcp"))
    assert len(parts) == 2
    content = parts[1].read_bytes()
    parts[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main(resume) == 2
    assert f"checkpoint-2 is damaged: optimizer/{parts[1].name} changed" in capsys.readouterr().err
    parts[1].write_bytes(content)
    assert main(resume) == 0
    assert_same_run(run, alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SEQUENCE, "--sequence-parallel 2 must divide the number of processes, but there are 1"),
        (TENSOR, "--tensor-parallel 2 must divide the number of processes, but there are 1"),
        ((*SEQUENCE, "--segment", "8"), "--segment does not work with --sequence-parallel"),
        ((*TENSOR, "--carry", "0.5"), "--carry does not work with --tensor-parallel"),
        (("--fsdp",), "--fsdp needs several processes, but there is one"),
        (("--fsdp", "--segment", "8"), "--segment does not work with --fsdp"),
        (("--checkpointing", "--segment", "8"), "--segment does not work with --checkpointing"),
    ],
)
def test_what_cannot_be_shared_is_refused(text, tmp_path, capsys, options, message):
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *TINY, *SHORT, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@needs_processes
def test_what_two_processes_cannot_share_is_refused_once(text, tmp_path):
    command = ["train", str(text), "--out", str(tmp_path / "run"), *OPTIONS, *TENSOR]
    heads, both = launch(
        2, tmp_path, [*command, "--attention", "elu", "--num-heads", "1"], [*command, *SEQUENCE], status=2
    )
    (line,) = heads.splitlines()
    assert "this cannot be run here: blocks.0.mixer: the number of ranks, 2, must divide the heads" in line
    (line,) = both.splitlines()
    assert (
        "--sequence-parallel 2 times --tensor-parallel 2 must divide the number of processes, but there are 2" in line
    )
    assert not (tmp_path / "run").exists()


@needs_processes
def test_a_divergence_is_told_once(text, tmp_path):
    command = ["train", str(text), "--out", str(tmp_path / "run"), *OPTIONS, *SEQUENCE, "--lr", "1e20", "--clip", "0"]
    (report,) = launch(2, tmp_path, command, status=1)
    assert report.count("training has diverged") == 1


def test_fsdp_is_chosen_by_its_option(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *OPTIONS]) == 2
    assert "Accelerate's configuration asks for FSDP: leave it out there, and give --fsdp" in capsys.readouterr().err


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


def test_a_run_of_which_no_update_can_be_made_does_not_go_on(alone, tmp_path, capsys):
    broken_off(alone, tmp_path / "run")
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--batch", "6"]) == 2
    message = "an update of the run takes 8 sequences, but 1 processes with --batch 6 take another number"
    assert f"{message}: choose --batch 1, 2, 4 or 8" in capsys.readouterr().err
