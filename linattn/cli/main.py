"""The console entry: runs the command and turns the user's errors into one line and an exit status."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from linattn.cli import bench, generate, info, linearize, train
from linattn.console.errors import CommandError, one_line
from linattn.names import did_you_mean
from linattn.version import __version__

COMMANDS = {"train": train, "generate": generate, "info": info, "linearize": linearize, "bench": bench}


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
            error.message += did_you_mean(value, map(str, action.choices or ()))
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


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = make_parser().parse_args(arguments)
    command = COMMANDS[parsed.command]
    try:
        # the `command` of a package takes seconds to import, so mistakes in its options are told before
        runner = import_module(f"{command.__name__}.command") if hasattr(command, "__path__") else command
        return runner.run(parsed)
    except CommandError as error:
        message, status = str(error), error.status
    except ModuleNotFoundError as error:
        # a missing module of our own is a bug
        if error.name is None or error.name.partition(".")[0] == "linattn":
            raise
        message, status = f"this needs {error.name}, which pip install 'linattn[cli]' brings", 2
    except BrokenPipeError:
        # the reader of the output is gone, as with `| head`; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        message, status = str(error), 2
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    print(f"linattn {parsed.command}: {' '.join(message.split())}", file=sys.stderr)
    return status
