"""The checkpoints of a run, each with the digests of its files: written so that a kill at any instant does no harm.

A checkpoint is complete before it gets its name, and its weights are copied into the run's folder after that."""

import hashlib
import json
from pathlib import Path

from linattn.cli.run_folder import Run
from linattn.cli.typed_json import read_json
from linattn.console.atomic import (
    copy_atomically,
    remove_atomically,
    remove_leftovers,
    rename_durably,
    write_atomically,
)
from linattn.console.errors import CommandError
from linattn.models.storage import CONFIG, WEIGHTS

MANIFEST = "files.json"


def adopt_checkpoint(run: Run, partial: Path, step: int, keep: int) -> None:
    """Give the complete checkpoint in the folder `partial` its name, make its weights the run's, and delete all
    checkpoints but the last `keep`."""
    digests = {
        file.relative_to(partial).as_posix(): _digest(file) for file in sorted(partial.rglob("*")) if file.is_file()
    }
    write_atomically(partial / MANIFEST, json.dumps(digests, indent=2))
    rename_durably(partial, run.checkpoint(step))
    _publish(run, step, keep)


def recover(run: Run, step: int, keep: int) -> None:
    """Restore a run that was killed at any instant to its state after the checkpoint of `step`. Keep the last `keep`
    checkpoints."""
    remove_leftovers(run.folder)
    remove_leftovers(run.checkpoints)
    lines = [json.dumps(record) + "\n" for record in run.records() if record["step"] <= step]
    write_atomically(run.log, "".join(lines))
    if step:
        _publish(run, step, keep)


def _publish(run: Run, step: int, keep: int) -> None:
    # the weights first: a folder with a configuration is a folder with a model
    for name in (WEIGHTS, CONFIG):
        copy_atomically(run.checkpoint(step) / name, run.folder / name)
    for old in run.saved_steps()[:-keep]:
        remove_atomically(run.checkpoint(old))


def last_step(run: Run) -> int:
    """Return the step of the newest checkpoint, 0 without one; raise if a file has changed since it was written."""
    *others, last = run.saved_steps() or [0]
    if not last:
        return 0
    folder = run.checkpoint(last)
    alternative = f"; without it the run goes on from step {others[-1]}" if others else ""
    try:
        expected = read_json(dict[str, str], (folder / MANIFEST).read_bytes())
        damaged = [name for name, digest in expected.items() if _digest(folder / name) != digest]
    except (OSError, ValueError) as error:
        reason = error if isinstance(error, OSError) else f"{MANIFEST} has no digests"
        raise CommandError(f"{folder} is damaged: {reason}{alternative}") from error
    if damaged:
        raise CommandError(f"{folder} is damaged: {', '.join(damaged)} changed after it was written{alternative}")
    return last


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
