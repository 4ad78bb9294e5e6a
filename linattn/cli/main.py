"""The console entry: runs the command and turns the user's errors into one line and an exit status."""

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from linattn.checks import MissingPackage, extra
from linattn.cli import bench, generate, info, linearize, read, serve, train
from linattn.console.errors import CommandError, one_line, out_of_memory, writing
from linattn.names import did_you_mean
from linattn.version import __version__

COMMANDS = {
    "train": train,
    "generate": generate,
    "read": read,
    "serve": serve,
    "info": info,
    "linearize": linearize,
    "bench": bench,
}


class OneLineParser(argparse.ArgumentParser):
    """Reports an error without the list of all options, and suggests the nearest known name."""

    # argparse declares this method by overloads
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # imported with torch, which takes a second
            from linattn.models.config import SYNONYMS

            nearest = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions, SYNONYMS)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            # imported with torch, which takes a second
            from linattn.models.config import SYNONYMS

            error.message += did_you_mean(value, map(str, action.choices or ()), SYNONYMS)
            raise

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(ValueError(message))} ({self.prog} --help explains)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="linattn", description="Language models with linear attention.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"linattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        described = commands.add_parser(name, help=command.SUMMARY, description=command.__doc__, allow_abbrev=False)
        command.add_arguments(described)
    return parser


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Let a request to terminate interrupt the block as Ctrl-C does, so that nothing is left half-written."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # only the main thread may handle signals
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def main(arguments: Sequence[str] | None = None) -> int:
    _prepare_streams()
    parsed = make_parser().parse_args(arguments)
    command = COMMANDS[parsed.command]
    try:
        needed, target = getattr(command, "EXTRA", "cli"), getattr(parsed, "out", None) or "the output"
        with extra(needed), interrupted_by_sigterm(), writing(target):
            # the `command` of a package takes seconds to import, so mistakes in its options are told before
            runner = import_module(f"{command.__name__}.command") if hasattr(command, "__path__") else command
            status = runner.run(parsed)
            sys.stdout.flush()
            return status
    except CommandError as error:
        message, status = str(error), error.status
    except MissingPackage as error:
        message, status = str(error), 2
    except BrokenPipeError:
        # the reader of the output is gone, as with `| head`
        _discard_output()
        return 0
    except OSError as error:
        message, status = str(error), 2
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    except (MemoryError, RuntimeError) as error:
        if (reason := out_of_memory(error)) is None:
            raise
        message, status = f"the memory is full: {reason}; {command.SMALLER} needs less", 2
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    print(f"linattn {parsed.command}: {' '.join(message.split())}", file=sys.stderr)
    return status


def _prepare_streams() -> None:
    """Open the null device for each stream that is closed, as those of a service may be, and replace characters that
    stdout cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _discard_output() -> None:
    """Discard the output that cannot be written. Python would try again at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
