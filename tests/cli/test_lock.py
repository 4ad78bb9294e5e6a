"""No two processes write to one folder: the later one says in one line who does."""

import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from linattn.console import lock
from linattn.console.errors import CommandError
from linattn.console.lock import lock_name, locked
from tests.cli.conftest import SHORT, TINY

LONG = (*TINY, *SHORT, "--steps", "1000000", "--save-every", "1", "--keep", "1")


class Windows:
    """Windows' locks, by the documentation of msvcrt.locking and LockFile: a region from a file's current position on,
    of one descriptor, which nobody else reads; and a file that is open cannot be deleted."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        self.regions = dict[tuple[int, int], int]()

    def locking(self, descriptor: int, mode: int, count: int) -> None:
        file, position = os.fstat(descriptor), os.lseek(descriptor, 0, os.SEEK_CUR)
        assert count == 1 and position >= file.st_size, "others cannot read what is locked"
        region = file.st_ino, position
        if (mode == self.LK_NBLCK) != (self.regions.get(region) is None):
            raise OSError(errno.EACCES, "Permission denied")
        self.regions |= {region: descriptor} if mode == self.LK_NBLCK else {}
        if mode == self.LK_UNLCK:
            del self.regions[region]

    @staticmethod
    def unlink(path: Path, missing_ok: bool = False) -> None:
        for descriptor in range(3, 1024):
            with suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    raise PermissionError(errno.EACCES, "the file is in use", str(path))
        os.unlink(path)


@pytest.fixture(params=["posix", "windows"])
def system(request, monkeypatch) -> Iterator[None]:
    """This system's locks, and Windows'."""
    if request.param == "posix":
        yield
        return
    windows = Windows()
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    monkeypatch.setattr("linattn.console.lock.sys", SimpleNamespace(platform="win32", stderr=sys.stderr))
    monkeypatch.setattr(Path, "unlink", windows.unlink)
    yield
    assert not windows.regions, "when a file is closed, Windows may unlock it later"


def refusal(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(scope="module")
def process(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen]:
    """A process that trains until it is killed, in a folder that is its last argument."""
    if not hasattr(signal, "SIGSTOP"):
        pytest.skip("Windows stops no processes")
    run = tmp_path_factory.mktemp("running") / "a run"
    command = [sys.executable, "-m", "linattn.cli", "train", str(text), *LONG, "--out", str(run)]
    with open(run.with_name("stderr"), "w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def run(process: subprocess.Popen) -> Path:
    return Path(process.args[-1])


@contextmanager
def stopped(process: subprocess.Popen, when: Callable[[], object]) -> Iterator[str]:
    """Stop the process, which then takes no time from this one, inside the block. Yield what it is called in errors."""
    while not when():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    yield f"a run is in use by process {process.pid} on {socket.gethostname()} since 20"
    process.send_signal(signal.SIGCONT)


def test_of_two_that_begin_at_once_one_runs(process, run, text, capsys):
    with stopped(process, lambda: lock_name(run).exists() and lock_name(run).stat().st_size) as holder:
        assert holder in refusal(capsys, "train", str(text), "--out", str(run), *LONG, "--replace")


def test_a_running_run_is_neither_replaced_nor_resumed_but_read(process, run, text, capsys):
    with stopped(process, (run / "config.json").exists) as holder:
        before = (run / "run.json").read_bytes()
        assert holder in refusal(capsys, "train", str(text), "--out", str(run), *LONG, "--replace")
        assert holder in refusal(capsys, "train", "--resume", "--out", str(run))
        assert holder in refusal(capsys, "train", "--resume", "--out", str(run / ".." / "a run"))
        assert main(["info", str(run)]) == 0
        assert main(["generate", str(run), "--max-new-tokens", "3"]) == 0
        assert (run / "run.json").read_bytes() == before
        saved = max(open_run(run).saved_steps())
    with stopped(process, lambda: max(open_run(run).saved_steps(), default=0) > saved):
        pass


def test_a_terminated_run_has_saved_its_last_step_and_goes_on(process, run, capsys):
    process.terminate()
    assert process.wait() == 130
    saved = max(open_run(run).saved_steps())
    last = run.with_name("stderr").read_text().splitlines()[-1]
    said, _, hint = last.partition("; ")
    assert said == f"linattn train: interrupted after step {saved:,}, which is saved"
    assert shlex.split(hint) == ["linattn", "train", "--resume", "--out", str(run), "goes", "on"]
    (run / "run.json").write_text((run / "run.json").read_text().replace("1000000", str(saved + 1)))
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert f"linattn generate {shlex.quote(str(run))} --prompt" in capsys.readouterr().err
    assert open_run(run).description["finished"] and sorted(os.listdir(run.parent)) == ["a run", "stderr"]


def test_a_conversion_has_its_folder_alone(text, tmp_path, capsys):
    with locked(tmp_path / "out"):
        line = refusal(capsys, "linearize", "model", "--data", str(text), "--out", str(tmp_path / "out"))
    assert f"out is in use by process {os.getpid()} on " in line
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_with_its_block_and_leaves_nothing(tmp_path, system):
    folder = tmp_path / "deep" / "folder"
    for failure in (None, KeyboardInterrupt):
        try:
            with locked(folder):
                assert lock_name(folder).exists()
                with pytest.raises(CommandError, match=f"is in use by process {os.getpid()} on"), locked(folder):
                    pass
                if failure:
                    raise failure
        except KeyboardInterrupt:
            pass
        assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_is_deleted_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """The one who deletes it may release it while another has it open already."""
    lock, deleted = lock_name(tmp_path / "folder"), []

    def delete_first(descriptor: int) -> None:
        if not deleted:
            deleted.append(lock.unlink())

    monkeypatch.setattr("linattn.console.lock._lock", delete_first)
    with locked(tmp_path / "folder"):
        assert deleted and lock.exists()


def test_where_no_file_can_be_created_the_command_ends(tmp_path, monkeypatch):
    """On Linux's /proc a new file is "not found", as in a folder that another process has removed meanwhile."""

    def create(*_):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(lock.os, "open", create)
    with pytest.raises(FileNotFoundError), locked(tmp_path / "run"):
        pass


def test_a_disk_without_locks_is_warned_of(tmp_path, monkeypatch, capsys):
    def unsupported(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("linattn.console.lock._lock", unsupported)
    with locked(tmp_path / "folder"):
        assert f"{tmp_path} has no locks" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_beside_a_folder_the_lock_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    (tmp_path / "folder").mkdir()
    assert lock_name(tmp_path / "folder") == tmp_path / "folder" / ".lock"
    assert lock_name(tmp_path / "new") == tmp_path / ".new.lock"


def test_a_process_that_waits_says_for_whom(tmp_path, monkeypatch, capsys):
    """As two conversions of the same data do, which are tokenized once. Here the first one fails, and removes the
    folders that it has made."""
    monkeypatch.setattr(lock, "SILENT_SECONDS", 0.0)
    events, data = [], tmp_path / "deep" / "data"
    with locked(data):
        thread = threading.Thread(target=lambda: events.append(wait_for(data)))
        thread.start()
        while not (line := capsys.readouterr().err):
            time.sleep(0.01)
        assert not events
    thread.join()
    assert events == ["held"]
    assert line.startswith(f"waiting: {data} is in use by process {os.getpid()}")


def wait_for(folder: Path) -> str:
    with locked(folder, wait=True):
        return "held"
