"""The report: each quantity against the length, per dtype and workload, as a table, a sentence and a picture."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from linattn.cli.bench import SOFTMAX
from linattn.cli.bench.record import BYTES, SECONDS, Point, Record
from linattn.console.page import STYLES, TEXT, axes, render, svg

SPEED_UP = "speed-up"


class View(NamedTuple):
    """A quantity: `sentence` is a template for a method and a value, `text` formats a value, `best` is min or max."""

    title: str
    sentence: str
    text: Callable[[float], str]
    best: Callable[..., Any] = min


VIEWS = {
    SECONDS: View("median time per call, ± fastest run to upper quartile", "{} takes {}", EngFormatter("s", 1)),
    SPEED_UP: View("speed-up over softmax", "{} is {} as fast as softmax", "{:.3g} ×".format, max),
    BYTES: View("peak memory above the inputs, or size of the state", "{} needs {}", EngFormatter("B", 1)),
}


class Panel(NamedTuple):
    """The curves of one quantity in one dtype for one workload: the points of each method, by n."""

    quantity: str
    dtype: str
    workload: str
    curves: dict[str, dict[int, Point]]

    @property
    def title(self) -> str:
        return f"{self.workload}, {self.dtype}: {VIEWS[self.quantity].title}"

    @property
    def sentence(self) -> str:
        """Compare the best method with softmax, if that was measured, at the greatest length that both have."""
        view, softmax = VIEWS[self.quantity], self.curves.get(SOFTMAX, {})
        others = {name: points for name, points in self.curves.items() if name != SOFTMAX} or self.curves
        lengths = {n for points in others.values() for n in points}
        n = max(lengths & softmax.keys() or lengths)
        value, best = view.best((points[n].value, name) for name, points in others.items() if n in points)
        values = {best: value} | ({SOFTMAX: softmax[n].value} if n in softmax else {})
        words = (view.sentence.format(name, view.text(x)) for name, x in values.items())
        return f"{self.workload}, {self.dtype}, n = {n:,}: {', '.join(words)}."

    @property
    def table(self) -> list[list[str]]:
        """Return a first row with the lengths, then a row per method with its values at these lengths."""
        ns = sorted({n for points in self.curves.values() for n in points})
        head, curves = ["", *(f"{n:,}" for n in ns)], self.curves.items()
        return [head, *([name, *(self._text(*x[n]) if n in x else "" for n in ns)] for name, x in curves)]

    def _text(self, low: float, value: float, high: float) -> str:
        spread = f" ±{(high - low) / value:.0%}" if self.quantity == SECONDS else ""
        return VIEWS[self.quantity].text(value) + spread

    def drawing(self, name: str, styles: dict[str, Any]) -> str:
        """Return an SVG, whose ids begin with `name`; `styles` has the style of each method's line."""
        view, plot = VIEWS[self.quantity], axes(f"{self.workload}, {self.dtype}", "n", (6.5, 4))
        for method, points in self.curves.items():
            lows, values, highs = np.array([*points.values()]).T
            plot.errorbar([*points], values, (values - lows, highs - values), label=method, **styles[method])
        plot.set(xscale="log", yscale="log", ylabel=self.quantity)
        plot.tick_params(axis="x", rotation=35)
        plot.xaxis.set(major_locator=LogLocator(2, numticks=12), minor_formatter=NullFormatter())
        plot.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
        plot.yaxis.set(major_locator=LogLocator(10, (1.0, 2.0, 5.0)), minor_formatter=NullFormatter())
        plot.yaxis.set_major_formatter(lambda y, _: view.text(y))
        plot.figure.legend(loc="outside right upper", frameon=False, fontsize=9)
        return svg(plot.figure, name, self.title)


def panels(record: Record) -> list[Panel]:
    """Return the panels of what was measured, and those of the speed-up over softmax."""
    curves: dict[tuple[str, str, str], Any] = defaultdict(lambda: defaultdict(dict))
    softmax = {each.key: each.point.value for each in record.measurements if each.method == SOFTMAX}
    for each in sorted(record.measurements, key=lambda each: each.n):
        low, value, high = each.point
        curves[each.quantity, each.dtype, each.workload][each.method][each.n] = each.point
        reference = softmax.get(replace(each, method=SOFTMAX).key)
        if each.quantity == SECONDS and each.method != SOFTMAX and reference is not None:
            ratio = Point(reference / high, reference / value, reference / low)
            curves[SPEED_UP, each.dtype, each.workload][each.method][each.n] = ratio
    return [Panel(*key, curves[key]) for key in sorted(curves, key=lambda key: (key[1], [*VIEWS].index(key[0])))]


def printed(record: Record) -> str:
    tables = [f"{panel.title}\n{aligned(panel.table)}" for panel in panels(record)]
    dropped = [f"not measured: {reason}: {', '.join(methods)}" for reason, methods in record.dropped.items()]
    return "\n\n".join([record.machine_line, *tables, *dropped])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Align names to the left and figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def html(record: Record) -> str:
    # softmax has the first style, black
    methods = sorted(dict.fromkeys(each.method for each in record.measurements), key=lambda name: name != SOFTMAX)
    styles, every = dict(zip(methods, cycle(STYLES), strict=False)), panels(record)
    with matplotlib.rc_context(TEXT):
        drawings = [panel.drawing(f"panel-{place}", styles) for place, panel in enumerate(every)]
    return render("cli/bench/report.html", record=record, methods=methods, panels=every, drawings=drawings)
