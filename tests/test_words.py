"""Docstrings, comments, names and pages are plain English, as far as a program can check CONTRIBUTING's rules."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import linattn

ROOT = Path(linattn.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
PAGES = sorted(page for folder in (ROOT.parent, ROOT.parent / "docs") for page in folder.glob("*.md"))

# a docstring that begins with one of these answers a question that the reader must guess
FRAGMENT = re.compile(r"(Of|That|What|Whether|From|Which|Who|Whose|Where|Why|How|Those)\b")
PHRASES = {
    "per": re.compile(
        r"\b(bits|bytes|nats|nanoseconds|milliseconds|seconds|ns|µs|ms|FLOPs?|[MG]B|one|one (state|map|number|φ))"
        r" an? (token|byte|head|step|second|layer|sequence|row|block|batch|file|chunk|channel)\b"
        r"|\btokens an? (second|step|sequence|row)\b"
    ),
    "predict": re.compile(r"\bforet(ell|old)"),
    "resample, again": re.compile(r"\banew\b"),
    "most likely": re.compile(r"\b(un)?likeliest\b"),
    "while, among": re.compile(r"\b(whil|among)st\b"),
}
SAYS_NOTHING = {"room", "taken", "works", "cells", "like"}
# participles that say what happened to a thing and not what it is; in `ops`, no name ends with one
PARTICIPLE = re.compile(
    r"(^|_)(asked|asking|chosen|done|found|given|gone|got|kept|made|shown|taken|told|turned|wanted|written)$"
)


def offences(file: str, source: str | None = None) -> Iterator[str]:
    source = (ROOT / file).read_text() if source is None else source
    tree = ast.parse(source)
    texts = [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline)]
    comments = [text for text in texts if text.startswith("#")]
    docstrings = [node.value.value for node in ast.walk(tree) if is_docstring(node)]
    yield from (f"begins mid-sentence: {text[:60]}" for text in docstrings if FRAGMENT.match(text))
    for text in (*docstrings, *comments):
        yield from unusual_phrases(text)
    yield from (
        f"the name says nothing: {name}" for name in (Path(file).stem, *names(tree)) if name.strip("_") in SAYS_NOTHING
    )


def participles(source: str) -> Iterator[str]:
    yield from (name for name in names(ast.parse(source)) if PARTICIPLE.search(name))


def unusual_phrases(text: str) -> Iterator[str]:
    for better, phrase in PHRASES.items():
        yield from (f"say {better!r} instead of: {match[0]}" for match in phrase.finditer(" ".join(text.split())))


def is_docstring(node: ast.AST) -> bool:
    """Tell whether a node is a string on its own: below a definition, or below an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


@pytest.mark.parametrize("file", FILES)
def test_words(file):
    assert not list(offences(file))


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("ops/")])
def test_names_are_no_participles(file):
    assert not list(participles((ROOT / file).read_text("utf-8")))


def test_participles_are_found():
    assert set(participles("def kept(x_given, shared): written = x.told")) == {"kept", "x_given", "written", "told"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words_of_pages(page):
    assert not list(unusual_phrases(page.read_text("utf-8")))


@pytest.mark.parametrize(
    "source",
    [
        '"""What the past left."""',
        'def f():\n    """Of each."""',
        'x = 1\n"""Whether it is."""',
        '"""Losses in nats\n    a token."""',
        "# 600 ns a token",
        '"""One thing, one state a block."""',
        "# features are drawn anew",
        "# whilst the state stays",
        "room = 1",
        "def f(*, like): ...",
        "x._taken = 1",
        "from a import b as works",
    ],
)
def test_offences_are_found(source):
    assert len(list(offences("", source))) == 1


def test_plain_sentences_are_none():
    assert not list(
        offences(
            "",
            '"""Ofen, which tokens a query sees. One is a head."""\n'
            "unlike, rooms, empty_like = 1, 2, 3  # of a token\n"
            "text = 'What a program prints is its own'",
        )
    )
