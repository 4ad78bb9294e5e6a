"""Two processes on one machine train what one process with batches of twice the size does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from tests.cli.conftest import SHORT, TINY

OPTIONS = (*TINY, *SHORT, "--accumulate", "2", "--cpu")
TORCHRUN = ("torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
COMMAND = ("-m", "linattn.cli")
SHARDING = (str(Path(__file__).parent / "shard_on_cpus.py"),)


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("distributed") / "alone"
    assert main(["train", str(text), "--out", str(run), *OPTIONS, "--batch", "8"]) == 0
    return run


def launch(*command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, env=environment)


def assert_same_weights(run: Path, other: Path) -> None:
    ours, theirs = load_file(run / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-5)


def assert_run_of_two(run: Path, alone: Path, done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stderr
    assert_same_weights(run, alone)
    assert open_run(run).description["processes"] == 2
    # one of them reports
    assert (run / "log.jsonl").read_text().count("\n") == (alone / "log.jsonl").read_text().count("\n")
    assert done.stderr.count("is complete") == 1


def test_two_processes_are_one(text, alone, tmp_path):
    run = tmp_path / "run"
    done = launch(*TORCHRUN, *COMMAND, "train", str(text), "--out", str(run), *OPTIONS)
    assert_run_of_two(run, alone, done)


def test_two_processes_that_share_the_weights_are_one(text, alone, tmp_path):
    """FSDP2, and going on with it."""
    run = tmp_path / "run"
    done = launch(*TORCHRUN, *SHARDING, "train", str(text), "--out", str(run), *OPTIONS, "--fsdp")
    assert_run_of_two(run, alone, done)
    # Trainer's own files of sharded runs: it was one
    assert (run / "checkpoints" / "checkpoint-4" / "pytorch_model_fsdp.bin").exists()
    weights = (run / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints" / "checkpoint-8")
    description = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(description | {"finished": None}))
    done = launch(*TORCHRUN, *SHARDING, "train", "--out", str(run), "--resume")
    assert done.returncode == 0, done.stderr
    assert "from step 4" in done.stderr
    assert (run / "model.safetensors").read_bytes() == weights


def test_sharding_needs_devices_to_share(text, tmp_path, capsys):
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *OPTIONS, "--fsdp"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--fsdp needs several processes with a GPU each, but there are 1 on cpu" in line
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_as_many_processes(alone, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(alone, run)
    description = json.loads((run / "run.json").read_text()) | {"finished": None, "processes": 2}
    (run / "run.json").write_text(json.dumps(description))
    assert main(["train", "--out", str(run), "--resume"]) == 2
    assert "the run began with 2 processes, so it cannot go on with 1" in capsys.readouterr().err
