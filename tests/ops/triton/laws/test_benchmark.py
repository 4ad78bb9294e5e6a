"""The benchmark of the kernels runs, and finds them right, once on tiny shapes."""

import runpy
import sys
from pathlib import Path

import pytest

from .conftest import INTERPRETED

FOLDER = Path(__file__).parents[4] / "benchmarks"
SECTIONS = (
    "forward",
    "training",
    "tiles",
    "long",
    "ablations",
    "softmax",
    "bidirectional",
    "dtypes",
    "local",
    "models",
)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, it is run itself")
def test_every_section_runs(monkeypatch, capfd) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--smallest", "--section", *SECTIONS])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / "gpu.py"), run_name="__main__")
    assert not end.value.code
    text = capfd.readouterr().out
    assert all(f"\n{section} " in f"\n{text}" for section in SECTIONS) and "wrong" not in text
