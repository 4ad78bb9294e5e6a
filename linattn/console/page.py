"""Reports as one HTML file with its pictures in it, without network and script. All extend console/page.html."""

import io
import re
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

# Okabe and Ito's colours and a dark red, which the colour-blind can tell apart
COLOURS = ["#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#882255"]
# for lines; beyond the last colour they begin again, with other lines
STYLES = cycler(color=2 * COLOURS, linestyle=9 * ["-"] + 9 * ["-."], marker=list("os^DvPX*<>hos^DvPX"))
TEXT: Any = {"font.size": 10, "axes.titlesize": 11, "svg.fonttype": "path"}


def render(template: str, **values: Any) -> str:
    """Fill in a template, named by its path in the package."""
    environment = Environment(autoescape=True, loader=FileSystemLoader(Path(__file__).parents[1], encoding="utf-8"))
    return environment.get_template(template).render(**values)


def axes(title: str, label: str, size: tuple[float, float] = (4.5, 3.2)) -> Any:
    """Return the axes of a new picture, with a `label` on the x axis."""
    plot = Figure(figsize=size, layout="constrained", facecolor="white").subplots()
    plot.set_title(title, loc="left")
    plot.set_xlabel(label)
    plot.grid(alpha=0.3)
    plot.spines[["top", "right"]].set_visible(False)
    return plot


def svg(figure: Figure, name: str, label: str) -> str:
    """Return the figure as SVG, with `label` as aria-label. Ids begin with `name`, as a page has several figures."""
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    _, tag, text = stream.getvalue().partition("<svg ")
    text = f'{tag}role="img" aria-label="{escape(label)}" {text}'
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
