"""Trackers, such as TensorBoard and Weights & Biases: they get the numbers of a run by Accelerate's classes."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from time import time_ns
from typing import Any

from linattn.console.errors import CommandError, explained
from linattn.names import unknown_name

HELP = (
    "send the log to this tracker too, by its name in Accelerate: tensorboard, which writes into a folder of the run, "
    "wandb, mlflow, …; repeatable"
)
EXTRAS = ("tensorboard", "wandb")
"""The trackers whose packages are extras of linattn."""
PROJECT = "linattn"


def check_trackers(names: Sequence[str]) -> None:
    """Raise CommandError for a name that Accelerate does not know, or whose package is missing."""
    if not names:
        return
    # the import takes a second
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    missing = {str(x) for x in LoggerType} - {str(x) for x in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise CommandError(str(unknown_name("--track", name, LOGGER_TYPE_TO_CLASS)))
        if name in missing:
            package = f'"linattn[{name}]"' if name in EXTRAS else name.replace("_", "-")
            raise CommandError(f"--track {name} needs a package: pip install {package} installs it")


class Trackers:
    """Sends the numbers of a run to the trackers of these `names`, which `check_trackers` has passed; only the process
    that reports makes one. `settings` describe the run, whose files are in the `folder`. A run that goes on after
    `step` steps has the same `identity` as before, so that its curves go on. TensorBoard then leaves out the values of
    later steps from before the interruption; Weights & Biases keeps them, and ignores the new ones."""

    def __init__(
        self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], *, identity: str, step: int = 0
    ) -> None:
        self.trackers: list[Any] = []
        if not names:
            return
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        run = sha256(identity.encode()).hexdigest()[:16]
        options = {
            # without the suffix, tensorboardX empties the file of an attempt that began within the same second
            "tensorboard": {"filename_suffix": f".{time_ns()}", **({"purge_step": step + 1} if step else {})},
            "wandb": {"name": folder.name, "id": run, "resume": "allow", "dir": str(folder)},
        }
        plain = {name: x if isinstance(x, bool | int | float | str) else str(x) for name, x in settings.items()}
        for name in dict.fromkeys(names):
            kind = LOGGER_TYPE_TO_CLASS[name]
            place = ("tensorboard", str(folder)) if name == "tensorboard" else (PROJECT, str(folder))
            # the errors are those of other packages, such as one of an account
            with explained(f"--track {name} does not start", Exception):
                tracker = kind(*place[: 1 + kind.requires_logging_directory], **options.get(name, {}))
                tracker.start()
                if not step:
                    tracker.store_init_configuration(plain)
            self.trackers.append(tracker)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Send the numbers among the values of a step."""
        numbers = {name: x for name, x in values.items() if isinstance(x, int | float)}
        for tracker in self.trackers:
            tracker.log(numbers, step=step)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
