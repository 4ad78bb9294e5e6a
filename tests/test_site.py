"""The site, as it is built: links lead somewhere, classes show their calls, formulas are set, nothing is fetched."""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PACKAGES = ("linattn", "linattn.integrations.transformers", "linattn.linearize", "linattn.states")
NAMES = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
# a subscript that is still written as in an editor
RAW = re.compile(r"(?<![\w.])\w_\{|(?<![\w.])[A-Za-zΣφαβ]_[ijt](?!\w)|\\(?:frac|sum|top|begin)\b")


class Page(HTMLParser):
    """The links, anchors, fetched files and prose of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.links, self.ids, self.fetched, self.prose = path, [], set(), [], ""
        self.verbatim = 0
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids.add(values.get("id"))
        self.links += [values["href"]] if tag == "a" and values.get("href") else []
        self.fetched += [values[key] for key in ("src", "href") if tag in ("img", "link", "script") and values.get(key)]
        self.verbatim += tag in ("code", "pre", "script", "math", "dt")

    def handle_endtag(self, tag: str) -> None:
        self.verbatim -= tag in ("code", "pre", "script", "math", "dt")

    def handle_data(self, data: str) -> None:
        self.prose += "" if self.verbatim else data


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build from a copy of the pages: sphinx writes the pages of names beside them."""
    folder = tmp_path_factory.mktemp("site")
    for part in ("docs", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("names", "jupyter_execute", "*.pyc"))
    # a build makes millions of objects, which the garbage collector would search again and again
    program = "import gc, sys; from sphinx.cmd.build import main; gc.disable(); sys.exit(main(sys.argv[1:]))"
    # the list of all pages beside each, which sphinx has checked, takes a third of the time
    short = ("navigation_depth=1", "collapse_navigation=1")
    options = ["--fail-on-warning", "--keep-going", "--quiet", *(f"-Dhtml_theme_options.{option}" for option in short)]
    build = [sys.executable, "-c", program, *options, "docs", "site"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(build, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def dead(page: Page, pages: dict[Path, Page]) -> list[str]:
    """Return the links to files and anchors that the site lacks."""
    found = []
    for link in page.links + page.fetched:
        parts = urlsplit(link)
        target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
        lacking = target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].ids
        if not (parts.scheme or parts.netloc) and (not target.exists() or lacking):
            found.append(link)
    return found


def test_links_lead_somewhere(pages):
    links = {path.name: dead(page, pages) for path, page in pages.items()}
    assert not {name: found for name, found in links.items() if found}


def test_nothing_is_fetched_from_a_network(pages):
    assert not {url for page in pages.values() for url in page.fetched if urlsplit(url).netloc}


@pytest.mark.parametrize("call", ["forward", "extend"])
def test_a_class_shows_how_it_is_called(call, site, pages):
    missing = []
    for name in NAMES:
        package, _, own = name.rpartition(".")
        method = getattr(getattr(importlib.import_module(package), own), call, None)
        if inspect.isfunction(method) and method.__module__.startswith("linattn."):
            ids = pages[site / f"reference/names/{name}.html"].ids
            missing += [] if f"{name}.{call}" in ids else [name]
    assert not missing


def test_formulas_have_real_subscripts(pages):
    raw = {page.path.name: RAW.findall(page.prose) for page in pages.values()}
    assert not {name: found for name, found in raw.items() if found}


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_suit_both_themes(picture):
    """Text has the colour of the theme or a colour of its own, and nothing is white on white or black on black."""
    text = picture.read_text("utf-8")
    plain = [tag for tag in re.findall(r"<text [^>]*>", text) if "fill" not in tag]
    assert "prefers-color-scheme:dark" in text or not plain
    assert not re.findall("#ffffff|#000000", text)
