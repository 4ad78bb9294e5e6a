"""What a command says when it cannot go on."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """One line for the user. The command ends with this exit status and leaves nothing half-written."""

    status = 2


class Interrupted(CommandError):
    """Ctrl-C; the message says what was saved. The exit status is the one that shells expect."""

    status = 130


class Diverged(CommandError):
    """Training has failed on its own: the message says what to try."""

    status = 1


@contextmanager
def explained(prefix: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds come from what the user gave, not from us: they become one line."""
    try:
        yield
    except kinds as error:
        raise CommandError(f"{prefix}: {one_line(error)}") from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error's sentence about an unknown name."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
