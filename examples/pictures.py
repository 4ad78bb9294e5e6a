"""Pictures for pages with a light and a dark theme: no background, and text and axes in the colour of the page's text.

A browser shows a picture in the theme of its page (`prefers-color-scheme`). To change pictures that matplotlib saved
elsewhere, such as those of a report:

    python -m examples.pictures docs/linearize-report-*.svg"""

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backend_bases import FigureCanvasBase

from examples.arguments import existing

FIRST_RULE = "*{stroke-linejoin"
THEMES = "svg{color:#222832;fill:currentColor}@media(prefers-color-scheme:dark){svg{color:#ced6dd}}"


def save(figure: Any, path: Path, *, text: str = "none") -> None:
    """Save a figure. With `text="path"`, letters are drawn as shapes, which formulas need."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".svg":
        return figure.savefig(path, dpi=100)
    stream = io.StringIO()
    # the salt makes a file the same from run to run
    with matplotlib.rc_context({"svg.fonttype": text, "svg.hashsalt": "linattn"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text(for_both_themes(stream.getvalue()), "utf-8")


def for_both_themes(svg: str) -> str:
    """Replace black by the colour of the theme's text and white by nothing."""
    svg = svg.replace("fill: #ffffff", "fill: none").replace("stroke: #ffffff", "stroke: none")
    svg = svg.replace("#000000", "currentColor")
    return svg if THEMES in svg else svg.replace(FIRST_RULE, THEMES + FIRST_RULE, 1)


def picture(text: str) -> Path:
    """Return the path of an argument that names a picture, in a format that can be written."""
    if (path := Path(text)).suffix.removeprefix(".") not in FigureCanvasBase.filetypes:
        raise argparse.ArgumentTypeError(f"{text} must end with .svg, .png or another format of matplotlib")
    return path


def parsed_out(description: str | None, arguments: Sequence[str] | None) -> Path:
    """Return the path that the command line of a picture gives with --out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=picture, required=True, help="the picture")
    return parser.parse_args(arguments).out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=existing, nargs="+")
    for path in parser.parse_args(arguments).pictures:
        path.write_text(for_both_themes(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
