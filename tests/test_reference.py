"""The reference has a page per public name, with an example that runs, and explains every parameter."""

import contextlib
import dataclasses
import importlib
import inspect
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import linattn

ROOT = Path(__file__).parents[1]
BESIDE = ("distributed", "integrations.transformers", "linearize", "states")
PACKAGES = ("linattn", *(f"linattn.{package}" for package in BESIDE))
NAMES = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
EXAMPLES = ROOT / "docs/reference/examples"
# a line that prints, and what it prints
PRINTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


def example(name: str) -> Path:
    """Return the example of a name. Where a record and its function differ by case only, as not in every file system,
    they share one."""
    own = name.rpartition(".")[2]
    return next(path for path in EXAMPLES.glob("*.py") if path.stem in (own, own.lower()))


def value(name: str) -> object:
    package, _, own = name.rpartition(".")
    return getattr(importlib.import_module(package), own)


def test_every_name_is_listed_once():
    listed = runpy.run_path(str(ROOT / "docs/conf.py"))["LISTED"]
    assert sorted(name for names in listed.values() for name in names) == sorted(NAMES)
    assert {path.stem for path in (ROOT / "docs/reference").glob("*.md")} == {*listed, "index"}


def test_versions_protect_every_name_of_the_reference():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (promise,) = re.findall(r"The public interface consists of the names that (.*?) list,", text, re.DOTALL)
    assert set(re.findall(r"`([\w.]+)`", promise)) == set(PACKAGES)


def test_every_example_is_of_a_name():
    assert set(EXAMPLES.glob("*.py")) == set(map(example, NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_the_example_prints_what_it_says(name, tmp_path, monkeypatch):
    code = example(name).read_text("utf-8")
    assert re.search(rf"\b{name.rpartition('.')[2]}\b", code)
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), {})
    wanted = PRINTED.findall(code)
    assert wanted, "an example shows what comes out"
    assert printed.getvalue().splitlines() == wanted


def parameters(public: object) -> list[str]:
    """Return the names of the parameters that the package adds to those of transformers' classes."""
    if not (inspect.isfunction(public) or inspect.isclass(public)):
        return []
    bases = [base for base in getattr(public, "__mro__", ()) if base.__module__.startswith("transformers.")]
    foreign = {"self", "args", "kwargs"}.union(*(inspect.signature(base).parameters for base in bases))
    return [name for name in inspect.signature(public).parameters if name not in foreign]


def explanation(public: Any) -> str:
    """Return the docstrings of a name and its module, of those to which it sends the reader, and the options that have
    a help text."""
    text = " ".join([inspect.getdoc(public) or "", inspect.getdoc(inspect.getmodule(public)) or ""])
    fields = dataclasses.fields(public) if dataclasses.is_dataclass(public) else ()
    helped = [field.name for field in fields if field.metadata.get("help")]
    others = [inspect.getdoc(getattr(linattn, name)) or "" for name in re.findall(r"\bSee\s`(\w+)`", text)]
    return " ".join([text, *helped, *others])


@pytest.mark.parametrize("name", [name for name in NAMES if parameters(value(name))])
def test_every_parameter_is_explained(name):
    public = value(name)
    text = explanation(public)
    assert [each for each in parameters(public) if not re.search(rf"(?<!\w){each}(?!\w)", text)] == []
