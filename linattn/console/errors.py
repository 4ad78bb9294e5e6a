"""Errors that a command reports to the user in one line."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

FULL = (errno.ENOSPC, errno.EFBIG, *([errno.EDQUOT] if hasattr(errno, "EDQUOT") else []))
# libraries in Rust end their messages with the number; torch does not know it
NUMBER = re.compile(r"\(os error (\d+)\)")
TORCH = re.compile(r"unexpected pos \d|iostream error|PytorchStreamWriter|file write failed")
MEMORY = re.compile(r"not enough memory|can't allocate memory|cannot allocate memory|out of memory", re.IGNORECASE)
SIZE = re.compile(r"allocate ([\d.]+ \w+)")


class CommandError(Exception):
    """An error reported in one line. The command ends with this exit status and leaves nothing half-written.

    The status is 2 for what the user gave, 1 if training has diverged, and 130, as shells expect, after Ctrl-C."""

    def __init__(self, message: str, *, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def explained(prefix: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these `kinds`, which the user's input causes, into a CommandError that begins with `prefix`."""
    try:
        yield
    except kinds as error:
        if out_of_memory(error):
            raise
        raise CommandError(f"{prefix}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def writing(target: object) -> Iterator[None]:
    """Turn the errors of a full disk, which each library reports in its own way, into one line with the target."""
    try:
        yield
    except Exception as error:
        if (reason := _full_disk(error)) is None:
            raise
        raise CommandError(f"{target} could not be written: {reason}") from error


def _full_disk(error: BaseException | None) -> str | None:
    """Return the system's words if a full disk, a quota or a limit on files has caused the error."""
    cause, torchs = error, False
    while cause is not None and not isinstance(cause, CommandError):
        match = NUMBER.search(str(cause))
        number = cause.errno if isinstance(cause, OSError) else int(match[1]) if match else None
        if number in FULL:
            return os.strerror(number)
        torchs = torchs or (isinstance(cause, RuntimeError) and TORCH.search(str(cause)) is not None)
        cause = cause.__cause__ or cause.__context__
    return "the disk is full, or a quota or a limit on files is reached" if torchs else None


def out_of_memory(error: BaseException) -> str | None:
    """Return what could not be allocated if this is an error of Python, torch or a GPU that the memory is full."""
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and MEMORY.search(str(error))):
        return None
    size = SIZE.search(str(error))
    return f"{size[1]} could not be allocated" if size else "an allocation failed"
