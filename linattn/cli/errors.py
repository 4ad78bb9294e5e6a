"""Errors that a command reports to the user in one line."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """An error reported in one line. The command ends with this exit status and leaves nothing half-written."""

    status = 2


class Interrupted(CommandError):
    """Training was interrupted by Ctrl-C; the message says what was saved. Shells expect this exit status."""

    status = 130


class Diverged(CommandError):
    """Training has diverged; the message says what to try."""

    status = 1


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
