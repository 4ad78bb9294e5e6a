"""Collected where kernels can run: see ../test_kernels.py."""

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    rewritten = config.getoption("jaxtyping_packages", default=None)
    return True if rewritten or not (INTERPRETED or CUDA) else None


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if CUDA else "cpu")
