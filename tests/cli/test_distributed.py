"""Two processes on one machine train what one process with batches of twice the size does."""

import contextlib
import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from tests.cli.conftest import SHORT, TINY
from tests.cli.shard_on_cpus import shard_on_cpus
from tests.processes import METHOD, needs_processes, run_in_two

OPTIONS = (*TINY, *SHORT, "--accumulate", "2", "--cpu")


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("distributed") / "alone"
    assert main(["train", str(text), "--out", str(run), *OPTIONS, "--batch", "8"]) == 0
    return run


ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}


def launch(folder: Path, *command: str) -> str:
    """Run the command in two processes in the environment that torchrun gives them, and return what both report."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    reports = [folder / "first", folder / "second"]
    mp.start_processes(main_by_torchrun, (port, reports, command), nprocs=2, start_method=METHOD)
    return "".join(report.read_text() for report in reports)


def main_by_torchrun(rank: int, port: int, reports: list[Path], command: tuple[str, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    main_of_two(rank, reports, command)
    # the command leaves its group to the end of its process; together, as torchrun waits for both
    dist.barrier()
    dist.destroy_process_group()


def launch_sharding(folder: Path, *command: str) -> str:
    """Run the command in two processes, whose CPUs share the weights, and return what both report."""
    reports = [folder / "first", folder / "second"]
    run_in_two(main_sharding, reports, command)
    return "".join(report.read_text() for report in reports)


def main_sharding(rank: int, reports: list[Path], command: tuple[str, ...]) -> None:
    shard_on_cpus()
    main_of_two(rank, reports, command)


def main_of_two(rank: int, reports: list[Path], command: tuple[str, ...]) -> None:
    os.environ |= ON_CPUS | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with reports[rank].open("w") as report, contextlib.redirect_stderr(report):
        assert main(command) == 0, reports[rank].read_text()


def assert_same_weights(run: Path, other: Path) -> None:
    ours, theirs = load_file(run / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-5)


def assert_run_of_two(run: Path, alone: Path, report: str) -> None:
    assert_same_weights(run, alone)
    assert open_run(run).description["processes"] == 2
    # one of them reports
    assert (run / "log.jsonl").read_text().count("\n") == (alone / "log.jsonl").read_text().count("\n")
    assert report.count("is complete") == 1


@needs_processes
def test_two_processes_are_one(text, alone, tmp_path):
    run = tmp_path / "run"
    report = launch(tmp_path, "train", str(text), "--out", str(run), *OPTIONS)
    assert_run_of_two(run, alone, report)


@needs_processes
def test_two_processes_that_share_the_weights_are_one(text, alone, tmp_path):
    """FSDP2, and going on with it."""
    run = tmp_path / "run"
    report = launch_sharding(tmp_path, "train", str(text), "--out", str(run), *OPTIONS, "--fsdp")
    assert_run_of_two(run, alone, report)
    # Trainer's own files of sharded runs: it was one
    assert (run / "checkpoints" / "checkpoint-4" / "pytorch_model_fsdp.bin").exists()
    weights = (run / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints" / "checkpoint-8")
    description = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(description | {"finished": None}))
    assert "from step 4" in launch_sharding(tmp_path, "train", "--out", str(run), "--resume")
    assert (run / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("other", ["--fsdp", "--checkpointing"])
def test_segments_are_refused_beside_what_they_do_not_have(text, tmp_path, capsys, other):
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *OPTIONS, "--segment", "8", other]) == 2
    assert f"--segment does not work with {other}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_sharding_needs_devices_to_share(text, tmp_path, capsys):
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *OPTIONS, "--fsdp"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--fsdp needs several processes with a GPU each, but there are 1 on cpu" in line
    assert not (tmp_path / "run").exists()


def test_a_run_of_which_no_update_can_be_made_does_not_go_on(alone, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(alone, run)
    description = json.loads((run / "run.json").read_text()) | {"finished": None}
    (run / "run.json").write_text(json.dumps(description))
    assert main(["train", "--out", str(run), "--resume", "--batch", "6"]) == 2
    message = "an update of the run takes 16 sequences, but 1 processes with --batch 6 take another number"
    assert f"{message}: choose --batch 1, 2, 4, 8 or 16" in capsys.readouterr().err
