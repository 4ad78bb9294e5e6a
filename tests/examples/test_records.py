"""The tables of the pages are those of the records beside them."""

from pathlib import Path

import pytest

import examples.linearize.report
from examples.learning import positions, report
from examples.learning.run import read

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    ("learning", "learning", report),
    ("learning", "positions", positions),
    ("linearize", "linearize", examples.linearize.report),
)


@pytest.mark.parametrize(("page", "records", "module"), PAGES)
def test_a_page_has_the_tables_of_its_records(page, records, module):
    text = (DOCS / f"{page}.md").read_text("utf-8")
    assert module.with_tables(text, read(DOCS / f"{records}.jsonl")) == text
