"""The report of measurements, as a page.

Every panel is an SVG of its own, and so is the legend: they stand side by side or, on a phone, in a column."""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from linattn.cli.bench import SOFTMAX, UNIFORM
from linattn.cli.bench.peers import PEERS
from linattn.cli.bench.record import ERROR, Record
from linattn.cli.bench.report import IN_BYTES, SHARE, Panel, Picture, dropped_lines, pictures, short, tables
from linattn.console.page import COLOURS, TEXT, axes, render, svg

Style = dict[str, Any]
# beyond the last colour they begin again, with other lines
STYLES = cycler(color=2 * COLOURS, linestyle=9 * ["-"] + 9 * ["-."], marker=list("os^DvPX*<>hos^DvPX"))
DOTTED: Style = {"color": "#555555", "linestyle": (0, (1, 1.5)), "linewidth": 1.5}


def html(record: Record) -> str:
    style = styles(dict.fromkeys(each.method for each in record.measurements))
    drawn = [(picture, draw(picture, style)) for picture in pictures(record)]
    values = {"record": record, "pictures": drawn, "dropped": dropped_lines(record), "tables": list(tables(record))}
    return render("cli/bench/report.html", **values)


def styles(methods: Iterable[str]) -> dict[str, Style]:
    """Give each method a colour and a marker. A peer has the colour of our method that does the same, dashed."""
    ours = [SOFTMAX, *(name for name in methods if name not in PEERS and name != SOFTMAX)]
    found: dict[str, Style] = dict(zip(ours, cycle(STYLES), strict=False))
    for name, marker in zip((name for name in methods if name in PEERS), cycle("xs^Dv"), strict=False):
        same = next((each for each in PEERS[name].counterpart.values() if each in found), SOFTMAX)
        found[name] = found[same] | {"marker": marker, "linestyle": "--", "markerfacecolor": "white"}
    return found


def draw(picture: Picture, style: dict[str, Style]) -> list[str]:
    """Return an SVG for each panel, and one for the legend."""
    with matplotlib.rc_context(TEXT):
        shown: dict[str, Any] = {}
        figures = [*(_draw_panel(panel, style, shown) for panel in picture.panels), Figure(figsize=(1, 1))]
        figures[-1].legend(shown.values(), shown.keys(), loc="center", frameon=False, fontsize=9)
        return [svg(each, f"{picture.id}-{place}", picture.title) for place, each in enumerate(figures)]


def _draw_panel(panel: Panel, style: dict[str, Style], shown: dict[str, Any]) -> Figure:
    plot = axes(panel.workload, "n (k = 1,024)", (4.5, 4))
    for method, points in panel.curves.items():
        lows, values, highs = np.array([*points.values()]).T
        if method == UNIFORM:
            shown[method] = plot.axhline(values[0], **DOTTED)
            continue
        # a single point would be hidden by the curves that pass there
        look: Style = {"markersize": 9, "zorder": 3} if len(values) == 1 else {"markersize": 6.5}
        look |= {"linewidth": 1.7, "markeredgewidth": 1.4, "capsize": 2.5} | style[method]
        shown[method] = plot.errorbar([*points], values, yerr=(values - lows, highs - values), **look)[0]
    if panel.view.one:
        shown[panel.view.one] = plot.axhline(1.0, **DOTTED)
    _label(plot, panel)
    return plot.figure


def _label(plot: Any, panel: Panel) -> None:
    plot.set_xscale("log", base=2)
    plot.tick_params(axis="x", rotation=35)
    plot.xaxis.set(major_locator=LogLocator(2, numticks=12), minor_formatter=NullFormatter())
    plot.xaxis.set_major_formatter(lambda x, _: short(float(x)))
    if panel.quantity in (ERROR, SHARE):
        top = 1.5 * panel.curves[UNIFORM][1].value if UNIFORM in panel.curves else None
        plot.set_ylim(bottom=0, top=top)
    else:
        values = [point.value for points in panel.curves.values() for point in points.values()]
        few = max(values) < 100 * min(values)
        in_bytes = panel.view.units is IN_BYTES
        ticks = LogLocator(2) if in_bytes else LogLocator(10, (1.0, 2.0, 5.0) if few else (1.0,))
        plot.set_yscale("log", nonpositive="mask")
        plot.yaxis.set(major_locator=ticks, minor_formatter=NullFormatter())
    plot.yaxis.set_major_formatter(lambda y, _: panel.view.shown(float(y)))
    plot.set_ylabel(panel.view.title)
