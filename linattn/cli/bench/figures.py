"""Draws the report's pictures, in Okabe and Ito's colours and a dark red, which the colour-blind can tell apart.

Every panel is an SVG of its own, and so is the legend: they stand side by side or, on a phone, in a column."""

import io
import math
import re
from collections.abc import Iterable
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from linattn.cli.bench.cases import SOFTMAX
from linattn.cli.bench.features import UNIFORM
from linattn.cli.bench.peers import PEERS
from linattn.cli.bench.record import ERROR
from linattn.cli.bench.views import SHARE, Panel, Picture

Style = dict[str, Any]
COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#882255")
MARKERS, HOLLOW = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h"), ("x", "s", "^", "D", "v")
DOTTED: Style = {"color": "#555555", "linestyle": (0, (1, 1.5)), "linewidth": 1.5}


def styles(methods: Iterable[str]) -> dict[str, Style]:
    """Give each method a colour and a marker. A peer has the colour of our method that does the same, dashed."""
    ours = [SOFTMAX, *(name for name in methods if name not in PEERS and name != SOFTMAX)]
    found: dict[str, Style] = {}
    for place, name in enumerate(ours):
        again, colour = divmod(place, len(COLOURS))
        line = ("-", "-.", ":")[again % 3]
        found[name] = {"color": COLOURS[colour], "marker": MARKERS[place % len(MARKERS)], "linestyle": line}
    for place, name in enumerate(name for name in methods if name in PEERS):
        same = next((each for each in PEERS[name].counterpart.values() if each in found), SOFTMAX)
        marker = HOLLOW[place % len(HOLLOW)]
        found[name] = found[same] | {"marker": marker, "linestyle": "--", "markerfacecolor": "white"}
    return found


def draw(picture: Picture, style: dict[str, Style]) -> list[str]:
    """Return an SVG for each panel, and one for the legend."""
    with matplotlib.rc_context({"font.size": 10, "axes.titlesize": 11, "svg.fonttype": "path"}):
        shown: dict[str, Any] = {}
        figures = [_draw_panel(panel, style, shown) for panel in picture.panels]
        legend = Figure(figsize=(1, 1))
        legend.legend(shown.values(), shown.keys(), loc="center", frameon=False, fontsize=9)
        figures.append(legend)
        label = escape(picture.title)
        return [_svg(figure, f"{picture.name}-{place}", label) for place, figure in enumerate(figures)]


def _draw_panel(panel: Panel, style: dict[str, Style], shown: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(4.5, 4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for method, points in panel.curves.items():
        if method == UNIFORM:
            shown[method] = axes.axhline(points[0].value, **DOTTED)
            continue
        xs, values, lows, highs = zip(*points, strict=True)
        error = [[v - low for v, low in zip(values, lows, strict=True)],
                 [high - v for v, high in zip(values, highs, strict=True)]]  # fmt: skip
        # a single point would be hidden by the curves that pass there
        look: Style = {"markersize": 9, "zorder": 3} if len(xs) == 1 else {"markersize": 6.5}
        look |= {"linewidth": 1.7, "markeredgewidth": 1.4, "capsize": 2.5} | style[method]
        shown[method] = axes.errorbar(xs, values, yerr=error, **look)[0]
    if panel.view.line:
        shown[panel.view.line] = axes.axhline(1.0, **DOTTED)
    _label(axes, panel)
    return figure


def _label(axes: Any, panel: Panel) -> None:
    points = [point for each in panel.curves.values() for point in each]
    axes.set_xscale("log", base=2)
    low, high = (math.log2(bound([point.n for point in points])) for bound in (min, max))
    powers = [2**power for power in range(math.ceil(low), math.floor(high) + 1)]
    if powers:
        axes.set_xticks(powers[:: 1 + len(powers) // 12])
        axes.tick_params(axis="x", rotation=35 if len(powers) > 5 else 0)
    axes.xaxis.set(major_formatter=FuncFormatter(lambda x, _: short(float(x))), minor_formatter=NullFormatter())
    if panel.view.quantity == ERROR or panel.view is SHARE:
        top = 1.5 * panel.curves[UNIFORM][0].value if UNIFORM in panel.curves else None
        axes.set_ylim(bottom=0, top=top)
    else:
        in_bytes = "bytes" in panel.view.quantity
        few = max(point.value for point in points) < 100 * min(point.value for point in points)
        ticks = LogLocator(2 if in_bytes else 10, (1.0,) if in_bytes or not few else (1.0, 2.0, 5.0))
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set(major_locator=ticks, minor_formatter=NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: panel.view.shown(float(y))))
    axes.set(xlabel="n (k = 1,024)", ylabel=panel.view.title)
    axes.set_title(panel.workload, loc="left")
    axes.grid(alpha=0.3, which="major")
    axes.spines[["top", "right"]].set_visible(False)


def short(x: float) -> str:
    """Write 65536 as 64k, as contexts are called; 100,000 stays."""
    return f"{x / 1024:,.0f}k" if x >= 1024 and x % 1024 == 0 else f"{x:,.0f}"


def _svg(figure: Figure, name: str, label: str) -> str:
    """Return the SVG. Ids get the picture's name, because a page holds several pictures."""
    with matplotlib.rc_context({"svg.hashsalt": name}):
        stream = io.StringIO()
        tight = None if figure.axes else "tight"
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches=tight)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
