"""Errors that a command reports to the user in one line."""

from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """An error reported in one line. The command ends with this exit status and leaves nothing half-written.

    The status is 2 for what the user gave, 1 if training has diverged, and 130, as shells expect, after Ctrl-C."""

    def __init__(self, message: str, *, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def explained(prefix: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, which the user's input causes, into one line."""
    try:
        yield
    except kinds as error:
        raise CommandError(f"{prefix}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
