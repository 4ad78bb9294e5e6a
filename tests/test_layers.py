"""Imports point one way: each layer imports only from those after it in LAYERS."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "linattn"
LAYERS = [
    {"cli"},
    {"linearize"},
    {"data"},
    {"console", "compat", "integrations", "serving"},
    {"generation"},
    {"distributed"},
    {"states"},
    {"models"},
    {"nn"},
    {"attention"},
    {"feature_maps", "ops"},
]
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}
# neighbours that may look at each other, one way
BESIDE = {("feature_maps", "ops"), ("compat", "integrations")}
# the files that every layer may import
BELOW = ("version", "types", "names", "checks", "files", "initialization")
# where a package of others may be imported, wherever in the file that happens
GUESTS = {
    "aiohttp": ("linattn/serving/",),
    "datasets": ("linattn/data/",),
    "pyarrow": ("linattn/data/",),
    "jinja2": ("linattn/console/",),
    "prometheus_client": ("linattn/serving/",),
    "triton": ("linattn/ops/triton",),
    "transformers": ("linattn/integrations/", "linattn/linearize/", "linattn/cli/"),
    "accelerate": ("linattn/integrations/", "linattn/console/", "linattn/cli/"),
    "peft": ("linattn/integrations/", "linattn/linearize/"),
    "tokenizers": ("linattn/integrations/", "linattn/cli/", "linattn/generation/"),
    "matplotlib": ("linattn/console/", "linattn/linearize/command/", "linattn/cli/"),
}
# what comes with `pip install linattn`, and so may be imported at the top of a file
BASE = {"torch", "jaxtyping", "linattn"}

FILES = sorted(PACKAGE.rglob("*.py"))
PARTS = sorted(PACKAGE.glob("integrations/*/*/*.py"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in the file; of `from a import b` both a and a.b, as b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports here are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(imports(ast.parse(path.read_text("utf-8"))))


def allowed(importer: str, imported: str) -> bool:
    if importer == imported or (importer, imported) in BESIDE:
        return True
    return DEPTH[importer] < DEPTH[imported]


# the files of BELOW stand below all layers; the others beside the layers stand above them, and no layer imports them,
# but that the command line shows what the diagnostics say
def test_imports_point_one_way():
    for path in FILES:
        layer = path.relative_to(PACKAGE).parts[0]
        for name in imports_of(path) if path.parent != PACKAGE else ():
            package, _, rest = name.partition(".")
            if package == "linattn" and rest:
                target = rest.split(".")[0]
                beside = target in BELOW or (layer, target) == ("cli", "diagnostics")
                assert target in DEPTH or beside, f"{relative(path)} imports {name}, which belongs to no layer"
                assert target not in DEPTH or allowed(layer, target), f"{relative(path)} imports {name}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/methods.md"])
def test_pages_show_the_layers(page):
    text = (PACKAGE.parent / page).read_text("utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("    cli  →  "))
    assert [set(layer.strip().split(", ")) for layer in line.split("→")] == LAYERS


def test_the_map_explains_every_layer():
    text = (PACKAGE.parent / "docs/methods.md").read_text("utf-8")
    assert [name for name in DEPTH if f"](../linattn/{name}/__init__.py): " not in text] == []


def test_parts_of_an_integration_do_not_import_each_other():
    for path in PARTS:
        own = path.parent.relative_to(PACKAGE.parent).as_posix().replace("/", ".")
        others = {".".join((own.rpartition(".")[0], part.parent.name)) for part in PARTS} - {own}
        for name in imports_of(path):
            assert not name.startswith(tuple(others)), (
                f"{relative(path)} imports {name}: what both need lies beside them"
            )


def test_guests_are_imported_at_home():
    for path in FILES:
        place = path.relative_to(PACKAGE.parent).as_posix()
        for name in imports_of(path):
            homes = GUESTS.get(name.partition(".")[0])
            assert homes is None or place.startswith(homes), f"{place} imports {name}, which belongs in {homes}"


# inside `ops`: definitions (what is computed) ← plain (the idea in chunks) ← fast (what runs anywhere) ← triton (what
# runs on GPUs). Each room may know those on its left and the ground floor, and nobody outside of `ops` knows any
ROOMS = ["definitions", "plain", "fast", "triton"]
GROUND = {"calls", "numerics", "operator", "library", "elementwise", "tokens"}
# who else knows them: the table of operators, and operators whose forms stand beside their public function
TABLES = {"operators.py", "convolution.py"}
PRIVATE = {*ROOMS, "operators", "operator", "library", "calls"}
# an operator that one guest alone needs lives with this guest, so that `ops` holds what the layers above it use
GUEST_OPERATORS = {"integrations/transformers/hybrids/selective_scan.py": {"operator"}}


def ops_imports(path: Path) -> Iterator[str]:
    """Yield the files and folders of `linattn.ops` that a file imports."""
    for name in imports_of(path):
        package, _, rest = name.partition("linattn.ops.")
        part = PACKAGE / "ops" / rest.partition(".")[0]
        if not package and rest and (part.is_dir() or part.with_suffix(".py").exists()):
            yield part.name


def test_the_rooms_of_ops_have_an_order():
    for path, part in ((file, part) for file in FILES for part in ops_imports(file)):
        layer, *rest = path.relative_to(PACKAGE).parts
        if layer != "ops":
            private = PRIVATE - GUEST_OPERATORS.get(relative(path), set())
            assert part not in private, f"{relative(path)} imports linattn.ops.{part}, which only linattn.ops knows"
        elif rest[0] in ROOMS:
            earlier = ROOMS[: ROOMS.index(rest[0]) + 1]
            assert part in {*earlier, *GROUND}, f"{relative(path)} imports linattn.ops.{part}"
        elif rest[0] not in TABLES:
            assert part not in ROOMS, f"{relative(path)} imports linattn.ops.{part}"


def test_a_wrong_import_is_seen():
    wrong = ast.parse("def f():\n    from linattn import models\n    import triton.language")
    assert {"linattn.models", "triton.language"} <= set(imports(wrong))
    assert not allowed("ops", "models")
    assert not allowed("models", "integrations")
    assert allowed("cli", "ops")
