"""The tables of the pages are those of the records beside them."""

from pathlib import Path

import pytest

from examples.learning import positions
from examples.learning.report import replaced
from examples.learning.report import with_tables as learning
from examples.learning.run import read
from examples.linearize.report import with_tables as linearizing

DOCS = Path(__file__).parents[2] / "docs"


def with_positions(page, runs):
    return replaced(page, "positions", positions.table(runs))


PAGES = (
    ("learning", "learning", learning),
    ("learning", "positions", with_positions),
    ("linearize", "linearize", linearizing),
)


@pytest.mark.parametrize(("page", "records", "with_tables"), PAGES)
def test_a_page_has_the_tables_of_its_records(page, records, with_tables):
    text = (DOCS / f"{page}.md").read_text("utf-8")
    assert with_tables(text, read(DOCS / f"{records}.jsonl")) == text
