"""`--track` sends what the log gets to trackers of Accelerate, and a wrong name or a missing package is told first."""

import math
import re
import time
from types import ModuleType

import accelerate.tracking
import pytest

from linattn.cli import reports
from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from linattn.console.trackers import Trackers, check_trackers
from tests.cli.conftest import SHORT, TINY
from tests.cli.test_resume import at_step, crash


class Recorder(accelerate.tracking.GeneralTracker):
    """Keeps in `events` what it gets."""

    name = "recorder"
    requires_logging_directory = False
    events: list

    def __init__(self, run_name, **options):
        super().__init__()
        self.events.append(("start", run_name))

    @property
    def tracker(self):
        return self.events

    def store_init_configuration(self, values):
        self.events.append(("settings", values))

    def log(self, values, step=None, **options):
        self.events.append((step, values))

    def finish(self):
        self.events.append(("finish", None))


def register(patch: pytest.MonkeyPatch) -> list:
    """Let "recorder" be the name of a tracker, and return what it will get."""
    patch.setattr(Recorder, "events", found := [], raising=False)
    patch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    return found


def options_of_trackers(patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list:
    """Return what the `module` will give to its trackers for the option of this name."""
    options = []

    class Trackers(module.Trackers):
        def __init__(self, *arguments, **named):
            options.append(named[name])
            super().__init__(*arguments, **named)

    patch.setattr(module, "Trackers", Trackers)
    return options


@pytest.fixture
def events(monkeypatch) -> list:
    return register(monkeypatch)


def test_a_tracker_gets_what_the_log_gets(text, tmp_path, monkeypatch, events):
    """Also of a run that goes on, by another path, whose options it gets once."""
    run, identities = tmp_path / "run", options_of_trackers(monkeypatch, reports, "identity")
    with monkeypatch.context() as patch:
        at_step(patch, 4, crash)
        with pytest.raises(ZeroDivisionError):
            main(["train", str(text), "--out", str(run), *TINY, *SHORT, "--track", "recorder"])
    (_, settings), *begun = events[1:]
    assert settings["context"] == 32 and settings["attention"] == "['local+elu']"
    assert begun.pop() == ("finish", None)
    events.clear()
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "--out", "run"]) == 0
    assert identities[0] == identities[1]
    assert events[0] == ("start", "linattn") and events[-1] == ("finish", None)
    saved = [event for event in begun if event[0] <= 4] + events[1:-1]
    records = [{name: x for name, x in record.items() if x is not None} for record in open_run(run).records()]
    assert saved == [(record["step"], record) for record in records]


def test_tensorboard_gets_the_curves(text, tmp_path):
    run = tmp_path / "run"
    assert main(["train", str(text), "--out", str(run), *TINY, *SHORT, "--track", "tensorboard"]) == 0
    (file,) = (run / "tensorboard").glob("events.*")
    content = file.read_bytes()
    names = {name for record in open_run(run).records() for name in record if name != "step"}
    assert all(name.encode() in content for name in names)


def test_a_second_attempt_within_a_second_keeps_the_file_of_the_first(tmp_path, monkeypatch):
    """tensorboardX names a file by its second and its machine, and would empty the first one."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    for number in range(3):
        trackers = Trackers(["tensorboard"], tmp_path, {}, identity="x")
        trackers.log({f"loss{number}": 1.0}, 1)
        trackers.close()
    files = sorted((tmp_path / "tensorboard").glob("events.*"))
    assert [f"loss{number}".encode() in file.read_bytes() for number, file in enumerate(files)] == [True] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "--track must be one of .*, but is 'tensorbord' .did you mean 'tensorboard'"),
        ("wandb", r'--track wandb needs a package: pip install "linattn\[wandb\]" installs it'),
        ("comet_ml", "--track comet_ml needs a package: pip install comet-ml installs it"),
    ],
)
def test_a_tracker_that_is_not_there_is_told_first(text, tmp_path, capsys, monkeypatch, name, message):
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [])
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *TINY, *SHORT, "--track", name]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_only_numbers_are_sent(events, tmp_path):
    check_trackers(["recorder", "recorder"])
    trackers = Trackers(["recorder", "recorder"], tmp_path, {"layers": None}, identity="x", step=3)
    trackers.log({"loss": math.pi, "norm": None, "name": "x"}, 4)
    trackers.close()
    assert events == [("start", "linattn"), (4, {"loss": math.pi}), ("finish", None)]
