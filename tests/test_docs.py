"""The pages tell the truth: the README's example prints what it says, links lead somewhere, the map has every name."""

import re
from pathlib import Path

import pytest

from linattn import ATTENTIONS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_the_readme_prints_what_it_says(capsys):
    names = {}
    printed = blocks(ROOT / "README.md", "text")
    for code, expected in zip(blocks(ROOT / "README.md", "python"), printed, strict=True):
        exec(code, names)
        assert capsys.readouterr().out == expected
    assert printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    missing = [link for link in LINK.findall(page.read_text("utf-8")) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_map_has_every_attention(name):
    rows = [line for line in (ROOT / "docs" / "index.md").read_text("utf-8").splitlines() if line.startswith("|")]
    assert any(f"`{name}`" in row for row in rows)
