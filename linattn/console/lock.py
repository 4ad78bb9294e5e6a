"""A lock on the folder that a command writes: no other process writes there until the command ends.

The operating system holds the lock and releases it when the process ends, also if it is killed. A hidden file beside
the folder has the lock and says which process that is."""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from linattn.console.atomic import missing_parents
from linattn.console.errors import CommandError

# a lock on Windows forbids reading, so it is on a byte that the file does not have
OFFSET = 1 << 30
POLL_SECONDS, SILENT_SECONDS = 0.1, 1.0
"""The time from one look at a lock to the next, and how long a process waits before it says so."""
TRIES = 1000
"""The number of times that the parents of a lock may be gone before it is there: some disks take no new file."""
UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def lock_name(folder: Path) -> Path:
    """Return the file that is locked for a folder. It lies beside the folder, as a command may replace the folder. If
    the parent folder cannot be written, the file lies in the folder."""
    folder = folder.resolve()
    if folder.is_dir() and not os.access(folder.parent, os.W_OK):
        return folder / ".lock"
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of the folder inside the block. If another process holds it, raise CommandError, with who that is,
    or `wait` until it ends, with a message.

    Some network disks have no locks; there a warning is printed."""
    path = lock_name(folder)
    with missing_parents(path):
        descriptor = _acquire(path, folder, wait)
        try:
            yield
        finally:
            _release(descriptor, path)


def _acquire(path: Path, folder: Path, wait: bool) -> int:
    """Lock the file at `path` for the `folder`, and return its descriptor. If another process deletes the file before
    it is locked, create and lock a new one."""
    began, announced, tries = time.monotonic(), False, 0
    while True:
        try:
            # a process that fails removes the parents that it has made
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            tries += 1
            if tries == TRIES:
                raise
            continue
        try:
            _lock(descriptor)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                _write_holder(descriptor)
                return descriptor
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in UNSUPPORTED:
                print(f"{path.parent} has no locks: let no other process write to {folder}", file=sys.stderr)
                return descriptor
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise
            if not wait:
                raise CommandError(f"{folder} is in use by {_holder(path)}: wait until it ends, or end it") from None
            if not announced and time.monotonic() - began > SILENT_SECONDS:
                announced = True
                print(f"waiting: {folder} is in use by {_holder(path)}", file=sys.stderr, flush=True)
            time.sleep(POLL_SECONDS)
            continue
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock the file. Raise OSError with EACCES, EAGAIN or EDEADLK if another process has locked it."""
    if sys.platform == "win32":
        import msvcrt

        _change_lock(descriptor, msvcrt.LK_NBLCK)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _release(descriptor: int, path: Path) -> None:
    if sys.platform == "win32":
        import msvcrt

        # when the file is closed, Windows may unlock it later; a disk without locks has nothing to unlock
        with suppress(OSError):
            _change_lock(descriptor, msvcrt.LK_UNLCK)
        os.close(descriptor)
        # Windows deletes no file that a process has open, so none that another process has locked
        with suppress(OSError):
            path.unlink(missing_ok=True)
    else:
        # before it is unlocked: later it could be the file of another process
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _change_lock(descriptor: int, mode: int) -> None:
    """Lock or unlock the file on Windows, as a `mode` of msvcrt says."""
    assert sys.platform == "win32"
    import msvcrt

    os.lseek(descriptor, OFFSET, os.SEEK_SET)
    msvcrt.locking(descriptor, mode, 1)


def _write_holder(descriptor: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    # on a full disk, other processes are told of "another process"
    with suppress(OSError):
        os.write(descriptor, json.dumps(holder).encode())


def _holder(path: Path) -> str:
    # the file is empty until its process has written to it
    with suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(path.read_bytes())
        return f"process {holder['process']} on {holder['host']} since {holder['since']}"
    return "another process"
