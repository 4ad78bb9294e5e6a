"""Runs the laws of the kernels, in laws/, in processes of their own: in Triton's interpreter, and on a GPU if any.

Triton decides when it is imported whether kernels are interpreted; and it reads their source, which must not have been
rewritten for the checking of shapes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
LAWS = Path(__file__).parent / "laws"


def run_laws(**environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(LAWS)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def run_script(name: str, *options: str, **environment: str) -> str:
    root = Path(__file__).parents[3]
    command = [sys.executable, str(root / "benchmarks" / name), *options]
    environment |= {"PYTHONPATH": str(root)}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")
def test_laws_hold_in_the_interpreter() -> None:
    assert importlib.util.find_spec("triton") is not None, "the test extra brings Triton on Linux"
    assert " passed" in run_laws(TRITON_INTERPRET="1")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")
def test_the_benchmark_runs_and_all_kernels_compile() -> None:
    """Without a GPU, in the processes that it starts; and for a GPU that is not there."""
    run_script("gpu.py", "--smallest", "--only", "step", TRITON_INTERPRET="1")
    text = run_script(
        "gpu_compile.py", "--widths", "32", "--dtypes", "bfloat16", "--extras", "decay", TRITON_INTERPRET="0"
    )
    for kernel in ("forward", "query_gradient", "key_gradients", "key_sums", "query_sums", "enter", "step", "read"):
        assert f"kernel {kernel} " in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_laws_hold_on_the_gpu() -> None:
    assert " passed" in run_laws(TRITON_INTERPRET="0")
