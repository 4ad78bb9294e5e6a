"""Errors that a command reports to the user in one line."""

import difflib
from collections.abc import Iterable, Iterator
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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
