"""The pictures of the report: Okabe and Ito's colours and a dark red, which the colour-blind can tell apart, and a
marker for each."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from linattn.cli.bench.peers import PEERS

COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
KNOWN = ("softmax", "elu", "efficient", "taylor", "local", "favor", "retention", "local+elu", "exp")
PLACES = {name: place for place, name in enumerate(KNOWN)}
HOLLOW = ("x", "s", "^", "D", "v")
SOFTMAX = "softmax"
Points = Sequence[tuple[float, float, float, float]]


class Style(NamedTuple):
    colour: str
    marker: str
    line: str


class Panel(NamedTuple):
    """One pair of axes: a curve for each method of (x, value, low, high)."""

    title: str
    x_label: str
    y_label: str
    curves: dict[str, Points]
    y_is_log: bool = True
    line_at: tuple[float, str] | None = None
    top: float | None = None


def styles(methods: Iterable[str]) -> dict[str, Style]:
    """Of one picture: known names look alike in all of them; another package has the colour of what it is, dashed."""
    methods = list(dict.fromkeys(methods))
    ours = list(dict.fromkeys(_ours(name, methods) for name in methods))
    free = [place for place in range(len(COLOURS)) if place not in {PLACES.get(name) for name in ours}]
    free += list(range(len(COLOURS), len(COLOURS) + len(ours)))
    found = {}
    for name in ours:
        place = PLACES[name] if name in PLACES else free.pop(0)
        # beyond the last colour they begin again, with other markers
        again, colour = divmod(place, len(COLOURS))
        found[name] = Style(COLOURS[colour], MARKERS[place % len(MARKERS)], ("-", "-.", ":")[again % 3])
    for place, name in enumerate(name for name in methods if name in PEERS):
        found[name] = Style(found[_ours(name, methods)].colour, HOLLOW[place % len(HOLLOW)], "--")
    return found


def _ours(name: str, methods: Sequence[str]) -> str:
    """Itself, or the method of ours that a peer is, which may depend on what is measured."""
    if name not in PEERS:
        return name
    like = list(PEERS[name].like.values())
    return next((method for method in like if method in methods), like[0])


def draw(panels: Sequence[Panel]) -> Figure:
    style = styles(method for panel in panels for method in panel.curves)
    with matplotlib.rc_context({"font.size": 11, "axes.titlesize": 12}):
        figure = Figure(figsize=(5.4 * len(panels) + 2.6, 4.6), layout="constrained", facecolor="white")
        shown: dict[str, Any] = {}
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            shown |= _draw_panel(axes, panel, style)
        figure.legend(shown.values(), shown.keys(), loc="outside right upper", frameon=False)
    return figure


def _draw_panel(axes: Any, panel: Panel, style: dict[str, Style]) -> dict[str, Any]:
    shown = {}
    for method, points in panel.curves.items():
        xs, values, lows, highs = zip(*points, strict=True)
        colour, marker, line = style[method]
        error = [[v - low for v, low in zip(values, lows, strict=True)],
                 [high - v for v, high in zip(values, highs, strict=True)]]  # fmt: skip
        look = {"color": colour, "marker": marker, "linestyle": line, "markersize": 6.5, "linewidth": 1.7}
        look |= {"markerfacecolor": "white"} if line == "--" else {}
        # a single point would be hidden by the curves that pass there
        look |= {"markersize": 9, "zorder": 3} if len(xs) == 1 else {}
        shown[method] = axes.errorbar(xs, values, yerr=error, markeredgewidth=1.4, capsize=2.5, **look)[0]
    if panel.line_at is not None:
        height, text = panel.line_at
        shown[text] = axes.axhline(height, color="#555555", linestyle=(0, (1, 1.5)), linewidth=1.5)
    _label(axes, panel)
    return shown


def _label(axes: Any, panel: Panel) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(float(x))))
    xs = [x for points in panel.curves.values() for x, *_ in points]
    powers = [2**power for power in range(math.ceil(math.log2(min(xs))), math.floor(math.log2(max(xs))) + 1)]
    powers = powers[:: 1 + len(powers) // 12]
    if powers:
        axes.set_xticks(powers)
        axes.tick_params(axis="x", rotation=35 if len(powers) > 5 else 0)
    axes.xaxis.set_minor_formatter(NullFormatter())
    if panel.y_is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if _narrow(panel) else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    if panel.top is not None:
        axes.set_ylim(top=panel.top)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_title(panel.title, loc="left")
    axes.grid(alpha=0.3, which="major")
    axes.spines[["top", "right"]].set_visible(False)


def _narrow(panel: Panel) -> bool:
    """Less than two decades, in which powers of ten alone would be too few marks."""
    values = [value for points in panel.curves.values() for _, value, *_ in points if value > 0]
    top = max(values, default=1) if panel.top is None else panel.top
    return top < 100 * min(values, default=1)


def short(x: float) -> str:
    """65536 is 64k, as contexts are called, and 100,000 stays what it is."""
    if x >= 1024 and x % 1024 == 0:
        return f"{x / 1024:,.0f}k"
    return f"{x:,.0f}"


def to_svg(figure: Figure, name: str) -> str:
    """Letters become outlines, so that it looks alike everywhere; ids are the picture's own, as pages hold several."""
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
