"""The pages tell the truth: the README's example prints what it says, links lead somewhere, the map has every name."""

import re
from pathlib import Path

import pytest

from linattn import ATTENTIONS
from linattn.cli.options import new_options

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)#?([^)\s]*)\)")


# a block of Python, and what it prints if the page says so
EXAMPLE = re.compile(r"^```python\n(.*?)^```(?:(?:\n+[^\n`]*)?\n+```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def examples(page: Path) -> list[tuple[str, str]]:
    return EXAMPLE.findall(page.read_text("utf-8"))


# the page on transformers has a test of its own, beside those of the integration
@pytest.mark.parametrize(
    "page", [page for page in PAGES if examples(page) and page.name != "transformers.md"], ids=lambda page: page.name
)
def test_examples_print_what_the_page_says(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # what torchrun sets for a single process
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    names = {}
    for code, expected in examples(page):
        exec(code, names)
        printed = capsys.readouterr().out
        assert printed == expected or not expected


def test_the_recommended_language_model_is_that_of_the_command():
    names = {}
    for code, _ in examples(ROOT / "docs" / "which_method.md"):
        exec(code, names)
    assert names["config"] == new_options({}).language_model(257)


def test_the_readme_has_an_example_with_its_output():
    assert any(code and output for code, output in examples(ROOT / "README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = LINK.findall(page.read_text("utf-8"))
    assert not [link for link, _ in links if not (page.parent / link).exists()]
    # GitHub shows these; the law of the site has the anchors of the others
    if page.parent == ROOT:
        targets = {(page.parent / link if link else page, anchor) for link, anchor in links if anchor}
        assert not [(target.name, anchor) for target, anchor in targets if anchor not in anchors(target)]


def anchors(page: Path) -> list[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_that_installs_needs_no_clone(page):
    assert not re.findall(r"^ *pip install '?\.", page.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_map_has_every_attention(name):
    rows = [line for line in (ROOT / "docs" / "methods.md").read_text("utf-8").splitlines() if line.startswith("|")]
    assert any(f"`{name}`" in row for row in rows)
