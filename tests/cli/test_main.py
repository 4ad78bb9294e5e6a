"""The command before any of its work: what it says where its packages are missing, and to names that do not exist."""

import argparse
import io
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from linattn.cli.main import main, make_parser
from tests.test_words import HERE_ONLY

BARE = Path(__file__).parents[1] / "package" / "bare.py"
# finds only the packages in argv, which an environment without any extra has, and linattn and the standard library
BLOCKED = """
import runpy, sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        known = {"linattn", *sys.stdlib_module_names, *sys.argv[2:]}
        return super().find_spec(name, *arguments) if name.partition(".")[0] in known else None

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def required(distribution: str, known: set[str]) -> set[str]:
    """Add a distribution, and what it requires on this machine without its extras, to those that are known."""
    if canonical(distribution) not in known:
        known.add(canonical(distribution))
        for requirement in map(Requirement, metadata.requires(distribution) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required(requirement.name, known)
    return known


def test_without_an_extra_it_helps_and_says_what_to_install():
    installed = required("linattn", set())
    assert {"torch", "jaxtyping"} <= installed and not {"numpy", "pydantic"} & installed
    modules = [
        name for name, owners in metadata.packages_distributions().items() if installed & set(map(canonical, owners))
    ]
    done = subprocess.run([sys.executable, "-c", BLOCKED, str(BARE), *modules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Each command's parser, and that of the commands themselves."""
    parser = make_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {"": parser, **commands.choices}


def known_names(action: argparse.Action) -> list[str]:
    return [str(name) for name in action.choices or getattr(action.type, "known", ())]


PARSERS = parsers()
NAMED = [(command, action) for command, parser in PARSERS.items() for action in parser._actions if known_names(action)]


def refusal(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("command, action", NAMED, ids=lambda x: getattr(x, "dest", x))
def test_an_unknown_name_suggests_the_nearest(command, action, capsys):
    """An option that is no name has a number, a text, or a file."""
    for name in known_names(action):
        wrong = [*action.option_strings[:1], name + "x"]
        assert f"did you mean '{name}'?" in refusal(capsys, *filter(None, [command]), *wrong), wrong


def test_whatever_takes_a_name_is_found():
    options = {f"{command} {action.option_strings[0]}" for command, action in NAMED if action.option_strings}
    assert options >= {"train --attention", "linearize --method", "bench --methods", "train --preset", "bench --dtypes"}
    words = {"METHOD", "NAME", "A,B", "COMMAND"}
    for parser in PARSERS.values():
        for action in parser._actions:
            # a name of files is a pattern
            if action.metavar in words and action.dest not in ("include", "exclude"):
                assert known_names(action), action


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("train", "x", "--out", "y", "--num-head"), "did you mean '--num-heads'?"),
        (("train", "x", "--out", "y", "--batch-size=4"), "did you mean '--batch'?"),
        (("train", "x", "--out", "y", "--method", "elu"), "did you mean '--attention'?"),
        (("train", "x", "--out", "y", "--feed-forward", "SwiGLU"), "did you mean 'gated'?"),
        (("train", "x", "--out", "y", "--attention", "local+performer"), "did you mean 'favor'?"),
    ],
)
def test_an_unknown_option_or_a_synonym_suggests_ours(capsys, arguments, expected):
    assert expected in refusal(capsys, *arguments)


def test_help_names_no_file_that_a_wheel_lacks():
    for parser in PARSERS.values():
        assert not HERE_ONLY.search(parser.format_help())


def test_a_name_like_none_suggests_none(capsys):
    with pytest.raises(SystemExit):
        main(["train", "x", "--out", "y", "--zzz"])
    assert "did you mean" not in capsys.readouterr().err


def test_it_needs_no_open_streams(finished, monkeypatch):
    """A service, such as one of cron or of a window system, may have none."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["generate", str(finished), "--prompt", "-", "--max-new-tokens", "2"]) == 0
    assert main(["info", str(finished)]) == 0


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_the_output_cannot_encode_is_replaced(finished, tmp_path, monkeypatch, encoding):
    folder, stream = tmp_path / "日本", io.BytesIO()
    shutil.copytree(finished, folder)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding=encoding))
    assert main(["info", str(folder)]) == 0
    assert b"??, begun" in stream.getvalue()
