"""One of several processes is killed: the others end with one line, and the same command, started again by torchrun or
as torchrun does it, goes on to the weights of a run that lost none."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from linattn.cli import generate
from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from linattn.data.windows import TrainingWindows
from tests.cli.conftest import SHORT, TINY
from tests.cli.test_sharing import ON_CPUS
from tests.processes import IMPORTS, METHOD, needs_processes, run_in_another

OPTIONS = (*TINY, *SHORT, "--cpu", "--steps", "4", "--save-every", "1", "--evaluate-every", "4")


def start(folder: Path, command: list[str], *, killed: int | None) -> tuple[list[int | None], list[str]]:
    """Start two processes, one of which is `killed` in the third step, or before the second piece of a prompt. Return
    how they end and what they report."""
    attempt = f"{folder}/{killed}"

    def process(rank: int) -> int | None:
        return run_in_another(train_as, rank, attempt, command, killed)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(process, range(2)))
    return ends, [Path(f"{attempt}-report-{rank}").read_text() for rank in range(2)]


def train_as(rank: int, attempt: str, command: list[str], killed: int | None) -> None:
    torch.set_num_threads(1)
    here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    here |= {"TORCHELASTIC_RUN_ID": "law"}
    os.environ |= ON_CPUS | here | {"TORCHELASTIC_RESTART_COUNT": str(int(killed is None))}
    dist.init_process_group("gloo", init_method=f"file://{attempt}-meeting", rank=rank, world_size=2)
    die_in_third_step(rank, killed)
    die_before_second_piece(rank, killed)
    with open(f"{attempt}-report-{rank}", "w") as report, contextlib.redirect_stderr(report):
        try:
            status = main(command)
        except Exception:
            traceback.print_exc()
            raise
        report.flush()
        sys.exit(status)


def die_in_third_step(rank: int, killed: int | None) -> None:
    read = TrainingWindows.__getitem__

    def read_or_die(self, index):
        if rank == killed and index >= 2 * 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, index)

    TrainingWindows.__getitem__ = read_or_die


def die_before_second_piece(rank: int, killed: int | None) -> None:
    extend = generate.state_after

    def extend_or_die(model, part, state, group):
        if rank == killed and state is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return extend(model, part, state, group)

    generate.state_after = extend_or_die


@needs_processes
@pytest.mark.parametrize(("killed", "options"), [(0, ("--batch", "2")), (1, ("--replace",))])
def test_the_others_end_and_a_restart_goes_on(text, finished_of_four, tmp_path, killed, options):
    """With each sequence over both processes, or two sequences at a time on each."""
    run, shared = tmp_path / "run", () if "--batch" in options else ("--sequence-parallel", "2")
    command = ["train", str(text), "--out", str(run), *OPTIONS, *shared, *options]
    ends, reports = start(tmp_path, command, killed=killed)
    assert ends[killed] == -signal.SIGKILL and ends[1 - killed] == 1, reports
    (line,) = [line for report in reports for line in report.splitlines() if "another process" in line]
    saved = open_run(run).saved_steps()[-1]
    assert saved in (1, 2)
    assert line.endswith(f"linattn train --resume --out {run} goes on from step {saved}")
    assert "Traceback" not in "".join(reports)
    ends, reports = start(tmp_path, command, killed=None)
    assert ends == [0, 0] and f"from step {saved}" in reports[0], reports
    assert_same_weights(run, finished_of_four)


@needs_processes
@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_end_where_they_read_a_prompt(finished_of_four, tmp_path, killed):
    """torchrun says itself that the first one was killed."""
    prompt = "the cat sees a tree and the dog runs. " * 440
    ends, reports = start(tmp_path, ["generate", str(finished_of_four), "--prompt", prompt, "--cpu"], killed=killed)
    assert ends[killed] == -signal.SIGKILL and ends[1 - killed] == 1, reports
    expected = ["", "another process has ended before the prompt was read: give the command again\n"]
    assert reports[1 - killed].removeprefix("linattn generate: ") == expected[killed]


@pytest.fixture
def handlers():
    """Torchrun's agent leaves its handlers of signals behind, which would end other laws."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@needs_processes
@pytest.mark.usefixtures("handlers")
def test_torchrun_starts_all_again(text, finished_of_four, tmp_path):
    """Its own agent notices that a process was killed, ends the other one, and starts both with the same command."""
    run = tmp_path / "run"
    command = ["train", str(text), "--out", str(run), *OPTIONS, "--batch", "2"]
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="law",
        start_method=METHOD,
    )
    multiprocessing.set_forkserver_preload(IMPORTS)
    elastic_launch(agent, train_or_die)(tmp_path, command)
    assert [(tmp_path / f"report-{count}-0").read_text().count("is complete") for count in range(2)] == [0, 1]
    assert re.search("from step [12]", (tmp_path / "report-1-0").read_text())
    assert_same_weights(run, finished_of_four)


def train_or_die(folder: Path, command: list[str]) -> None:
    """Train, and die in the third step if this is the second process of the first attempt."""
    torch.set_num_threads(1)
    os.environ |= ON_CPUS
    rank, count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    die_in_third_step(rank, killed=1 if count == 0 else None)
    with open(folder / f"report-{count}-{rank}", "w") as report, contextlib.redirect_stderr(report):
        status = main(command)
        report.flush()
        if status:
            sys.exit(status)


def assert_same_weights(run: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, other))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def finished_of_four(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("four") / "run"
    assert main(["train", str(text), "--out", str(run), *OPTIONS]) == 0
    return run


def test_a_restart_takes_no_other_run(text, finished, tmp_path, monkeypatch, capsys):
    """Without the same data, or of another command, a run that exists is refused as ever."""
    run, command = shutil.copytree(finished, tmp_path / "run"), ["train", str(text), "--out", str(tmp_path / "run")]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "new")
    for launch in (None, "old", "new"):
        open_run(run).describe(launch=launch)
        assert main(["train", str(text / "a.txt"), *command[2:]]) == 2
        assert "there is a run in" in capsys.readouterr().err
        assert main(command) == (0 if launch == "new" else 2)
        assert ("is complete" if launch == "new" else "there is a run in") in capsys.readouterr().err
