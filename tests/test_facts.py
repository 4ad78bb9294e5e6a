"""Facts about an attention stand once, where `traits` finds them: neither package nor tests list attentions by name.

A test may run over some methods as examples, as the argument of `parametrize` or in a loop. Any other collection of
names says something about them, which a new attention would have to join, so it needs a reason here."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from linattn import ATTENTIONS, Traits, traits

ROOT = Path(__file__).parents[1]
FILES = sorted(path.relative_to(ROOT).as_posix() for top in ("linattn", "tests") for path in (ROOT / top).rglob("*.py"))
FEWEST = 3
LISTS = (ast.Tuple, ast.List, ast.Set, ast.Dict)
# the method of each name, and its numbers or its own options
TABLES = "a table of methods"
EXAMPLES = "examples, each with its options or what is expected"
OTHERS = "another package's names, of which some are spelled as ours"
ALLOWED = {
    "linattn/attention/named.py": TABLES,
    "linattn/feature_maps/__init__.py": TABLES,
    "linattn/ops/elementwise.py": TABLES,
    "linattn/ops/triton/maps.py": TABLES,
    "linattn/cli/bench/command.py": "the methods that are measured unless the user names some",
    "tests/cli/test_bench.py": EXAMPLES,
    "tests/attention/test_rotary.py": EXAMPLES,
    "tests/attention/test_traits.py": EXAMPLES,
    "tests/compat/performer_pytorch/test_attention.py": OTHERS,
    "tests/compat/performer_pytorch/test_fast_attention.py": OTHERS,
    "tests/compat/performer_pytorch/test_performer.py": OTHERS,
    "tests/feature_maps/test_elementwise.py": "the definition of each elementwise map",
    "tests/linearize/test_conversion.py": EXAMPLES,
    "tests/integrations/transformers/own_model/models.py": EXAMPLES,
}


def names_in(node: ast.AST) -> set[str]:
    """Return the names of attentions that stand in a literal collection, or are keys of a dictionary."""
    elements = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
    texts = {each.value for each in elements if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return texts & set(ATTENTIONS)


def examples(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what a test runs over: all that is inside the arguments of `parametrize`, and what a loop walks over."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parametrize":
            yield from (inside for argument in node.args for inside in ast.walk(argument))
        elif isinstance(node, (ast.For, ast.comprehension)):
            yield node.iter


def lists(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the collections of names that are no examples, or hold all attentions of which a fact is true or false."""
    shown = set(examples(tree))
    for node in ast.walk(tree):
        names = names_in(node)
        if len(names) >= FEWEST and (node not in shown or names in extensions()):
            yield node


@cache
def extensions() -> list[set[str]]:
    facts = {name: traits(name) for name in ATTENTIONS}
    return [
        {name for name in ATTENTIONS if getattr(facts[name], fact) == value}
        for fact in Traits._fields
        for value in (True, False)
    ]


def test_no_list_of_attentions():
    found = {}
    for file in set(FILES) - set(ALLOWED):
        if lines := [node.lineno for node in lists(ast.parse((ROOT / file).read_text("utf-8")))]:
            found[file] = lines
    assert not found, f"lines {found}: let `traits` say what is true of the attentions listed there"


@pytest.mark.parametrize("file", ALLOWED)
def test_a_file_with_a_reason_has_such_a_list(file):
    assert list(lists(ast.parse((ROOT / file).read_text("utf-8"))))


@pytest.mark.parametrize(
    "source",
    [
        "LEARNED = ('t2r', 'hedgehog', 'linformer', 'linformer_conv')",
        "if name in {'elu', 'relu', 'local', 'another'}: pass",
        "WHY = {'elu': 1, 'relu': 2, 'local': 3}",
        "@pytest.mark.parametrize('name', ['gla', 'ssd', 'delta', 'gated_delta', 'kda', 'rwkv7'])\ndef test(name): ...",
    ],
)
def test_lists_are_found(source):
    assert list(lists(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.parametrize('name', ['elu', 'softmax', 'local'])\ndef test(name): ...",
        "for name in ('elu', 'softmax', 'local'): pass",
        "BOTH = ('elu', 'softmax', 'a', 'b', 'c')",
    ],
)
def test_examples_are_none(source):
    assert not list(lists(ast.parse(source)))
