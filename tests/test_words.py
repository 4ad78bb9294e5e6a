"""Docstrings, comments, names and pages are plain English, as far as a program can check CONTRIBUTING's rules."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
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
    source = (ROOT / file).read_text("utf-8") if source is None else source
    yield from sentences(source)
    found = (Path(file).stem, *names(ast.parse(source)))
    yield from (f"the name says nothing: {name}" for name in found if name.strip("_") in SAYS_NOTHING)


def sentences(source: str) -> Iterator[str]:
    """Yield the offences of docstrings and comments."""
    texts = [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline)]
    comments = [text for text in texts if text.startswith("#")]
    docstrings = [node.value.value for node in ast.walk(ast.parse(source)) if is_docstring(node)]
    yield from (f"begins mid-sentence: {text[:60]}" for text in docstrings if FRAGMENT.match(text))
    for text in (*docstrings, *comments):
        yield from unusual_phrases(text)


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


def test_words():
    found = {file: list(offences(file)) for file in FILES}
    assert not {file: texts for file, texts in found.items() if texts}


def test_sentences_of_examples_and_benchmarks():
    paths = [path for folder in ("examples", "benchmarks") for path in (ROOT.parent / folder).rglob("*.py")]
    found = {path: list(sentences(path.read_text("utf-8"))) for path in paths}
    assert paths and not {path: texts for path, texts in found.items() if texts}


def test_names_are_no_participles():
    found = {path: list(participles(path.read_text("utf-8"))) for path in (ROOT / "ops").rglob("*.py")}
    assert not {path: names for path, names in found.items() if names}


def test_participles_are_found():
    assert set(participles("def kept(x_given, shared): written = x.told")) == {"kept", "x_given", "written", "told"}


# a user may have the wheel alone, which has no such folders; a docstring is read in the source, or on the site
HERE_ONLY = re.compile(r"\b(docs|benchmarks|examples|tests)/\w+")
SITE = re.compile(r"https://linattn\.github\.io/linattn/(\w+)\.html#([\w-]+)")


def texts(source: str) -> Iterator[str]:
    """Yield the strings that are no docstrings; of a formatted one, its parts."""
    tree = ast.parse(source)
    silent = {node.value for node in ast.walk(tree) if is_docstring(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in silent:
            yield node.value


@pytest.mark.parametrize("file", [*FILES, *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.html"))])
def test_no_text_names_a_file_that_the_wheel_lacks(file):
    source = (ROOT / file).read_text("utf-8")
    for text in texts(source) if file.endswith(".py") else [source]:
        assert not HERE_ONLY.search(text), text
        for page, anchor in SITE.findall(text):
            headings = re.findall(r"^#+ (.+)$", (ROOT.parent / f"docs/{page}.md").read_text("utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"\W+", "-", heading.lower()).strip("-") for heading in headings], text


# a command that ends in a formatted value, which may have spaces
UNQUOTED = re.compile(r"\blinattn (train|generate|info|linearize|bench)\b[^:.;]*$")


def unquoted(source: str) -> Iterator[str]:
    """Yield the beginnings of commands that are put together without `shlex`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            yield from (part for part, value in pairwise(parts) if part and not value and UNQUOTED.search(part))


@pytest.mark.parametrize("file", FILES)
def test_commands_to_type_are_quoted(file):
    assert not list(unquoted((ROOT / file).read_text("utf-8")))


def test_unquoted_commands_are_found():
    assert list(unquoted("f'{x}: linattn generate {folder} --prompt'")) == [": linattn generate "]
    assert not list(unquoted("f'linattn {command}: {x}', f'linattn train: {x}', f'{command} of linattn train'"))


def test_texts_are_found():
    source = "def f(x):\n    'see docs/a.md'\n    raise ValueError(f'{x}: docs/b.md', 'docs/' 'c.md')"
    assert [text for text in texts(source) if HERE_ONLY.search(text)] == ["docs/c.md", ": docs/b.md"]


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
