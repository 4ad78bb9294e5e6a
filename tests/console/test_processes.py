"""The processes of a command wait for the first one as long as it takes, and each can say why it ends."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from linattn.console.errors import CommandError
from linattn.console.processes import first_process_only, reported_by_first
from tests.processes import needs_processes, run_in_two


def wait_twice(rank: int) -> None:
    """The second time, the first process is late as if it tokenized much text."""
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    for seconds in (0.0, 1.0):
        first_process_only(rank, Path("out"), partial(time.sleep, seconds))
    assert first_process_only(rank, Path("out"), lambda: rank) == 0


@needs_processes
def test_the_first_process_is_waited_for():
    run_in_two(wait_twice)


def test_torchrun_reports_why_another_process_than_the_first_has_ended(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit), reported_by_first(1):
        raise CommandError("the memory of this GPU is too small")
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=2, error_file=str(file))
    assert "traceback : the memory of this GPU is too small" in str(ChildFailedError("linattn", {1: failure}))
