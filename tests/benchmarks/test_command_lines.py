"""Each program explains itself by --help, before it measures anything, and refuses names that it does not know."""

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {"--only", "--parts", "--variants", "--methods", "--attentions", "--workloads"}
PROGRAMS = [
    path.relative_to(ROOT)
    for folder in ("benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text("utf-8")
]


EXAMPLES = [path for path in PROGRAMS if path.parts[0] == "examples"]


def arguments(path: Path) -> Iterator[str]:
    """Yield the first name of each argument that the program's parser has."""
    for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""


LISTS = [(path, option) for path in PROGRAMS for option in arguments(path) if option in NAMES]


@pytest.fixture
def run(monkeypatch):
    def run(path: Path, *given: str) -> int | str | None:
        if path.name.startswith("gpu"):
            pytest.importorskip("triton")
        # a script finds those beside it
        monkeypatch.syspath_prepend(str(ROOT / path.parent))
        monkeypatch.setattr(sys, "argv", [str(path), *given])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / path), run_name="__main__")
        return ended.value.code

    return run


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_it_explains_itself(path, run, capsys):
    assert not run(path, "--help")
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8")))
    shown = capsys.readouterr().out.split()
    assert docstring and " ".join(docstring.split()[:8]) in " ".join(shown)


@pytest.mark.parametrize(("path", "option"), LISTS, ids=str)
def test_an_unknown_name_is_refused(path, option, run, capsys):
    positional = ["x" for name in arguments(path) if name and not name.startswith("-")]
    assert run(path, *positional, option, "nope") == 2
    assert "nope" in capsys.readouterr().err.splitlines()[-1]


NUMBERS = [
    (path, option)
    for path in EXAMPLES
    for option in arguments(path)
    if option
    in {"--steps", "--seed", "--rows", "--texts", "--side", "--tokens", "--depth", "--lr", "--data", "--mnist"}
]


@pytest.mark.parametrize(("path", "option"), NUMBERS, ids=str)
def test_numbers_and_files_that_cannot_be_are_refused(path, option, run, capsys):
    """A file of this name is not there."""
    model = [str(ROOT)] if "model" in arguments(path) else []
    assert run(path, option, "-3", *model) == 2
    assert "-3" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_what_an_argument_may_be_is_checked_by_its_type(path):
    """A number has a bound, and what is read must be there: a path that need not is written."""
    for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            name, types = ast.unparse(node.args[0]), [ast.unparse(x.value) for x in node.keywords if x.arg == "type"]
            assert not {"int", "float"} & set(types), name
            assert types != ["Path"] or name in ("'--out'", "'--folder'"), name


def test_all_kinds_are_walked():
    assert len(PROGRAMS) > 50 and len(LISTS) > 10 and len(NUMBERS) > 15
