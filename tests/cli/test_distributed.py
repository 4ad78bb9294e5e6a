"""Two processes on one machine train what one process with batches of twice the size does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from tests.cli.conftest import SHORT, TINY

OPTIONS = (*TINY, *SHORT, "--accumulate", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num-processes", "2", "--num-machines", "1", "--main-process-port", "0")


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("distributed") / "alone"
    assert main(["train", str(text), "--out", str(run), *OPTIONS, "--batch", "8"]) == 0
    return run


def launch(launcher: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *launcher, "-m", "linattn.cli", "train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def assert_same_weights(run: Path, other: Path) -> None:
    ours, theirs = load_file(run / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharded", [(), ("--fsdp",)], ids=["ddp", "fsdp2"])
def test_two_processes_are_one(text, alone, tmp_path, sharded):
    run = tmp_path / "run"
    done = launch(TORCHRUN, str(text), "--out", str(run), *OPTIONS, "--cpu", *sharded)
    assert done.returncode == 0, done.stderr
    assert_same_weights(run, alone)
    assert open_run(run).description["processes"] == 2
    # one of them reports
    assert (run / "log.jsonl").read_text().count("\n") == (alone / "log.jsonl").read_text().count("\n")
    assert done.stderr.count("is complete") == 1
