"""The tables of the pages are those of the records beside them."""

from pathlib import Path

import pytest

import examples.linearize.report
from examples.learning import positions, report
from examples.learning.run import read
from examples.talk import combined

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


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (report.main, ["none.jsonl", "page.md"]),
        (examples.linearize.report.main, ["none.jsonl", "page.md"]),
        (positions.main, ["--out", "none.jsonl", "--page", "none.md"]),
        (combined.main, ["masked", "--data", "text", "--lookup", "none.jsonl", "--out", "page.md"]),
    ],
)
def test_records_that_are_not_there_empty_no_table(main, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(page := (DOCS / "learning.md").read_text("utf-8"), "utf-8")
    (tmp_path / "masked").mkdir()
    for name in ("text", "masked/config.json"):
        (tmp_path / name).touch()
    with pytest.raises(SystemExit):
        main(arguments)
    assert "there is no file none." in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text("utf-8") == page
