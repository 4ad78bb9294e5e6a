"""What a command says when it cannot go on."""

from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """One line for the user. The command ends with exit status 2 and leaves nothing half-written."""


class Interrupted(Exception):
    """Ctrl-C; the message says what was saved. Exit status 130, as shells expect."""


@contextmanager
def explained(prefix: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds come from what the user gave, not from us: they become one line."""
    try:
        yield
    except kinds as error:
        raise CommandError(f"{prefix}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
