"""Draws the report's pictures, in Okabe and Ito's colours and a dark red, which the colour-blind can tell apart.

Every panel is an SVG of its own, and so is the legend: they stand side by side or, on a phone, in a column."""

import io
import re
from collections.abc import Iterable
from html import escape
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from linattn.cli.bench.cases import SOFTMAX
from linattn.cli.bench.features import UNIFORM
from linattn.cli.bench.peers import PEERS
from linattn.cli.bench.record import ERROR
from linattn.cli.bench.views import SHARE, Panel, Picture

Style = dict[str, Any]
COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#882255")
MARKERS, HOLLOW = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h"), ("x", "s", "^", "D", "v")
# beyond the last colour they begin again, with other lines
LINES = ("-",) * len(COLOURS) + ("-.",) * len(COLOURS)
DOTTED: Style = {"color": "#555555", "linestyle": (0, (1, 1.5)), "linewidth": 1.5}


def styles(methods: Iterable[str]) -> dict[str, Style]:
    """Give each method a colour and a marker. A peer has the colour of our method that does the same, dashed."""
    ours = [SOFTMAX, *(name for name in methods if name not in PEERS and name != SOFTMAX)]
    found: dict[str, Style] = {}
    for name, colour, marker, line in zip(ours, cycle(COLOURS), cycle(MARKERS), cycle(LINES), strict=False):
        found[name] = {"color": colour, "marker": marker, "linestyle": line}
    for name, marker in zip((name for name in methods if name in PEERS), cycle(HOLLOW), strict=False):
        same = next((each for each in PEERS[name].counterpart.values() if each in found), SOFTMAX)
        found[name] = found[same] | {"marker": marker, "linestyle": "--", "markerfacecolor": "white"}
    return found


def draw(picture: Picture, style: dict[str, Style]) -> list[str]:
    """Return an SVG for each panel, and one for the legend."""
    with matplotlib.rc_context({"font.size": 10, "axes.titlesize": 11, "svg.fonttype": "path"}):
        shown: dict[str, Any] = {}
        figures = [*(_draw_panel(panel, style, shown) for panel in picture.panels), Figure(figsize=(1, 1))]
        figures[-1].legend(shown.values(), shown.keys(), loc="center", frameon=False, fontsize=9)
        return [_svg(each, f"{picture.name}-{place}", picture.title) for place, each in enumerate(figures)]


def _draw_panel(panel: Panel, style: dict[str, Style], shown: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(4.5, 4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for method, points in panel.curves.items():
        if method == UNIFORM:
            shown[method] = axes.axhline(points[0].value, **DOTTED)
            continue
        xs, values, lows, highs = np.array(points).T
        # a single point would be hidden by the curves that pass there
        look: Style = {"markersize": 9, "zorder": 3} if len(xs) == 1 else {"markersize": 6.5}
        look |= {"linewidth": 1.7, "markeredgewidth": 1.4, "capsize": 2.5} | style[method]
        shown[method] = axes.errorbar(xs, values, yerr=(values - lows, highs - values), **look)[0]
    if panel.view.line:
        shown[panel.view.line] = axes.axhline(1.0, **DOTTED)
    _label(axes, panel)
    return figure


def _label(axes: Any, panel: Panel) -> None:
    axes.set_xscale("log", base=2)
    axes.tick_params(axis="x", rotation=35)
    axes.xaxis.set(major_locator=LogLocator(2, numticks=12), minor_formatter=NullFormatter())
    axes.xaxis.set_major_formatter(lambda x, _: short(float(x)))
    if panel.view.quantity == ERROR or panel.view is SHARE:
        top = 1.5 * panel.curves[UNIFORM][0].value if UNIFORM in panel.curves else None
        axes.set_ylim(bottom=0, top=top)
    else:
        values = [point.value for points in panel.curves.values() for point in points]
        few = max(values) < 100 * min(values)
        in_bytes = "bytes" in panel.view.quantity
        ticks = LogLocator(2) if in_bytes else LogLocator(10, (1.0, 2.0, 5.0) if few else (1.0,))
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set(major_locator=ticks, minor_formatter=NullFormatter())
    axes.yaxis.set_major_formatter(lambda y, _: panel.view.shown(float(y)))
    axes.set(xlabel="n (k = 1,024)", ylabel=panel.view.title)
    axes.set_title(panel.workload, loc="left")
    axes.grid(alpha=0.3, which="major")
    axes.spines[["top", "right"]].set_visible(False)


def short(x: float) -> str:
    """Write 65536 as 64k, as contexts are called; 100,000 stays."""
    return f"{x / 1024:,.0f}k" if x >= 1024 and x % 1024 == 0 else f"{x:,.0f}"


def _svg(figure: Figure, name: str, label: str) -> str:
    """Return the SVG. Ids get the picture's name, because a page holds several pictures."""
    stream, tight = io.StringIO(), None if figure.axes else "tight"
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches=tight)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
