"""The working folder of `linattn linearize`, beside OUT, from which an interrupted conversion resumes."""

import argparse
import json
import sys
from pathlib import Path

from linattn.console.atomic import write_atomically
from linattn.console.errors import CommandError
from linattn.linearize.command.result import read_json, settings
from linattn.linearize.processes import process_count, process_rank

SETTINGS, PROCESSES = "settings.json", "number of processes"


def say(text: object) -> None:
    """Print a message, of the first process only."""
    if process_rank() == 0:
        print(text, file=sys.stderr)


def work_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


def open_work(arguments: argparse.Namespace) -> Path:
    """Return the working folder. An interrupted conversion resumes only with the same options."""
    work = work_folder(arguments.out)
    options, path = settings(arguments) | {PROCESSES: process_count()}, work / SETTINGS
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(options, indent=2))
        return work
    before = {PROCESSES: 1} | read_json(path)
    if other := [name for name in options if options[name] != before.get(name)]:
        raise CommandError(f"{work} was begun with another {', '.join(other)}: give the same, or delete the folder")
    say(f"going on with {work}")
    return work
