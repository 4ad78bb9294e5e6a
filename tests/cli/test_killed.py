"""A run that is killed at any instant, any number of times, ends as if nothing had happened.

What `kill -9` leaves is what is on the disk at that instant. So the folder is copied before every call that opens,
flushes, renames or deletes something, and each file that is written is cut in half once more; each of these copies must
lead to the weights of a run that was never killed. Going on from a copy is itself watched in the same way, until there
is nothing new: a kill during what follows a kill, and so on, leads nowhere else."""

import builtins
import gc
import hashlib
import io
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from linattn.cli.main import main
from linattn.cli.run_folder import is_run
from linattn.console.atomic import write_atomically
from linattn.console.lock import lock_name
from tests.cli.conftest import SHORT, TINY
from tests.processes import run_in_another

OPTIONS = (*TINY, *SHORT, "--steps", "2", "--save-every", "1", "--keep", "1", "--log-every", "1", "--dropout", "0.2")
CALLS = [(builtins, "open"), (io, "open")]
CALLS += [(os, name) for name in ("open", "rename", "replace", "mkdir", "rmdir")]
LOG, TIMED = "log.jsonl", ("run.json", "trainer_state.json", "files.json")
"""Files whose content depends on the clock: one of lines, and some that are one value."""

Disk = dict[str, bytes | None]
"""Every file's content; a folder has none."""


def read(folder: Path) -> Disk:
    """Folders come before what is in them. Thousands of calls make pathlib too slow here."""
    disk: Disk = {}
    start = len(str(folder)) + 1
    for place, folders, files in os.walk(folder):
        disk |= dict.fromkeys(os.path.join(place, name)[start:] for name in folders)
        for path in (os.path.join(place, name) for name in files):
            # `open` is watched
            with io.FileIO(path) as file:
                disk[path[start:]] = file.read()
    return disk


def restore(folder: Path, disk: Disk) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in disk.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


def half_written(before: Disk, after: Disk) -> Iterator[Disk]:
    """For each file that is new or longer: the disk when half of the new bytes were there."""
    for name, content in after.items():
        old = before.get(name) or b""
        if content and content != old and content not in before.values():
            kept = len(old) if content.startswith(old) else 0
            yield after | {name: content[: (kept + len(content)) // 2]}


@contextmanager
def watched(folder: Path) -> Iterator[list[Disk]]:
    disks = [read(folder)]
    watching = True

    def look() -> None:
        nonlocal watching
        if watching:
            watching = False
            if (disk := read(folder)) != disks[-1]:
                disks.extend([*half_written(disks[-1], disk), disk])
            watching = True

    def looking(call):
        def looked(*arguments, **options):
            if str(folder) in str(arguments[:2]):
                look()
            return call(*arguments, **options)

        return looked

    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS:
            patch.setattr(module, name, looking(getattr(module, name)))
        # a killed process loses nothing that it wrote, flushed or not, and flushing is slow
        patch.setattr(os, "fsync", lambda _: None)
        yield disks
        look()


def identity(disk: Disk) -> str:
    """Equal for disks that differ by the clock only, or by the file of a lock, which nobody holds after a kill."""

    def told(name: str, content: bytes | None) -> object:
        if content is None:
            return None
        if LOG in name:
            return content.count(b"\n"), content.endswith(b"\n")
        if any(timed in name for timed in TIMED):
            return content.rstrip().endswith(b"}")
        return hashlib.sha256(content).hexdigest()

    return json.dumps({name: told(name, content) for name, content in disk.items() if name != ".run.lock"})


def go_on(text: Path, run: Path) -> int:
    if is_run(run):
        return main(["train", "--resume", "--out", str(run)])
    return main(["train", str(text), "--out", str(run), *OPTIONS])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes most of a tiny run's time: a collection of garbage after each, and its picture."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    monkeypatch.setattr("linattn.cli.training.draw_curve", lambda _, path: write_atomically(path, "a picture"))


@pytest.mark.slow
@pytest.mark.usefixtures("quick", "unchecked")
def test_every_instant(text, tmp_path):
    folder = tmp_path / "runs"
    run, todo, seen = folder / "run", [{}], set()
    names, weights = None, None
    folder.mkdir()
    while todo:
        restore(folder, begun := todo.pop())
        with watched(folder) as disks:
            assert go_on(text, run) == 0, sorted(begun)
        ended = read(folder)
        names, weights = names or ended.keys(), weights or ended["run/model.safetensors"]
        assert ended["run/model.safetensors"] == weights, sorted(begun)
        # and nothing is left of what was broken off
        assert ended.keys() == names, sorted(begun)
        for disk in disks:
            if (known := identity(disk)) not in seen:
                seen.add(known)
                todo.append(disk)
        # what is left would pile up for ever
        assert len(seen) < 500
    assert len(seen) > 100


def test_every_instant_of_a_replacement(text, finished, tmp_path, monkeypatch):
    """There is the old run, or the new one, or none and the same command again makes it."""
    monkeypatch.setattr("linattn.cli.training._train", lambda *_: None)
    folder = tmp_path / "runs"
    shutil.copytree(finished, folder / "run")
    old = (folder / "run" / "run.json").read_bytes()

    def replace() -> set[str]:
        assert main(["train", str(text), "--out", str(folder / "run"), *OPTIONS, "--replace"]) == 0
        assert (folder / "run" / "run.json").read_bytes() != old
        return {str(path.relative_to(folder)) for path in folder.rglob("*")}

    with watched(folder) as disks:
        names = replace()
    for disk in disks:
        restore(folder, disk)
        description = disk.get("run/run.json")
        assert description is None or description == old or names <= disk.keys()
        assert replace() == names


def train_until(fatal: str, arguments: list[str]) -> None:
    """Train, and die before a file of the fatal name appears."""

    def killing(rename):
        def rename_or_die(source, target):
            if target.name == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        return rename_or_die

    os.rename, os.replace = killing(os.rename), killing(os.replace)
    main(arguments)


def test_the_systems_own_kill_twice_in_a_row(text, tmp_path):
    """Between the list of a checkpoint's files and its name, and then after its name."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert go_on(text, alone) == 0
    for fatal, arguments in (("checkpoint-2", [str(text), *OPTIONS]), ("curve.png", ["--resume"])):
        assert run_in_another(train_until, fatal, ["train", "--out", str(run), *arguments]) == -signal.SIGKILL
        assert lock_name(run).exists(), "nobody could delete it"
    assert go_on(text, run) == 0
    assert (run / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
