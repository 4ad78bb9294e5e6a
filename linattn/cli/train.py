"""`linattn train`: train a language model on text; the run is a folder."""

import argparse
import sys
from pathlib import Path

from linattn.cli.options import add_options, given_options, new_options, resumed_options
from linattn.cli.run_folder import is_run, open_run, require_free
from linattn.cli.vocabulary import load_vocabulary
from linattn.console.errors import CommandError
from linattn.console.processes import is_restart, launch_name
from linattn.data.sources import DATA_HELP

SMALLER = "a lower --batch, --context, --dim or --depth"
SUMMARY = "train a language model on text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="*", metavar="DATA", help=DATA_HELP)
    parser.add_argument("--out", required=True, type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in RUN, exactly from its last checkpoint"
    )
    parser.add_argument("--replace", action="store_true", help="delete the run that is in RUN, if there is one")
    add_options(parser)


def _resume_begun(arguments: argparse.Namespace) -> None:
    """After a restart by torchrun, resume the run that this command has begun, but no older one."""
    begun = open_run(arguments.out).description
    if begun["paths"] == arguments.data and begun.get("launch") == launch_name():
        arguments.resume, arguments.replace, arguments.data = True, False, []


def run(arguments: argparse.Namespace) -> int:
    given = given_options(arguments)
    if is_restart() and is_run(arguments.out) and not arguments.resume:
        _resume_begun(arguments)
    if arguments.resume:
        if arguments.data or arguments.replace:
            raise CommandError("--resume goes on with the run's own data, so it takes neither DATA nor --replace")
        begun = open_run(arguments.out)
        options = resumed_options(begun.description["options"], given)
        if begun.description["finished"]:
            print(f"{arguments.out} is complete: there is nothing to go on with", file=sys.stderr)
            return 0
        vocabulary = begun.vocabulary()
    else:
        if not arguments.data:
            raise CommandError("DATA is missing: name files, folders or data sets of text")
        if given.keys() >= {"validation_part", "validation_data"}:
            raise CommandError("--validation-part is of DATA, but --validation-data takes its place: give one of them")
        require_free(arguments.out, replace=arguments.replace)
        options = new_options(given)
        vocabulary = load_vocabulary(options.tokenizer)
    # imported late, because the import takes seconds and errors should come first
    from linattn.cli.training import train

    train(arguments, options, vocabulary)
    return 0
