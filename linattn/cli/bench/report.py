"""The contents of the report: curves of what was measured and of ratios of it, a sentence on each picture, and the
tables as text."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from linattn.cli import bench
from linattn.cli.bench import RATE, SOFTMAX, UNIFORM
from linattn.cli.bench.record import BYTES, ERROR, SECONDS, STATE_BYTES, Point, Record

Rows = list[list[str]]
SPEED_UP, SHARE, THROUGHPUT = "times faster than softmax", "share of the product rate", "tokens per second"
IN_BYTES = ((2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " bytes"))
IN_SECONDS = ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs"))


class View(NamedTuple):
    """The words for a quantity."""

    title: str
    sentence: str
    units: tuple[tuple[float, str], ...] = ((1.0, ""),)
    best: Callable[..., Any] = min
    one: str = ""
    """The meaning of a value of 1."""
    spread: str = ""
    """The end of a table's title, if the table has the spreads."""

    def shown(self, value: float) -> str:
        """Return three digits, with a unit if the quantity has one."""
        size, unit = next((each for each in self.units if value >= each[0]), self.units[-1])
        return f"{value / size:,.0f}{unit}" if value / size >= 99.95 else f"{value / size:.3g}{unit}"


VIEWS = {
    SECONDS: View("median time per call", "{} takes {}", IN_SECONDS, spread=", ± fastest run to upper quartile"),
    BYTES: View("peak memory above the inputs", "{} needs {}", IN_BYTES),
    STATE_BYTES: View("size of the state", "the state of {} has {}", IN_BYTES),
    SPEED_UP: View(SPEED_UP, "{} is {} times as fast as softmax", best=max, one="softmax"),
    SHARE: View(SHARE, "{} reaches {}", best=max, one="64³ products"),
    THROUGHPUT: View(THROUGHPUT, "{} reads {} tokens per second", best=max),
    ERROR: View("relative error of the output", "{} is {} away from softmax"),
}

# the captions are in report.html
PICTURES = (
    ("time", "Time against length", (SECONDS,), (bench.FORWARD, bench.TRAINING)),
    ("memory", "Memory against length", (BYTES,), (bench.FORWARD, bench.TRAINING)),
    ("speedup", "Speed-up over softmax", (SPEED_UP,), (bench.FORWARD, bench.TRAINING)),
    ("share", "Share of the machine's limit", (SHARE,), (bench.FORWARD, bench.TRAINING)),
    ("token", "A generated token", (SECONDS, STATE_BYTES, BYTES), (bench.DECODING,)),
    ("models", "Complete models: training and prompts", (THROUGHPUT,), (bench.MODEL_TRAINING, bench.MODEL_PREFILL)),
    ("generation", "Complete models: generation", (SECONDS, STATE_BYTES, BYTES), (bench.MODEL_DECODING,)),
    ("features", "Feature maps on real queries and keys", (ERROR,), (bench.WITH_FEATURES,)),
)


Curves = dict[str, dict[int, Point]]
"""The points of each method, by n."""


def all_curves(record: Record) -> dict[tuple[str, str, str], Curves]:
    """Return the curves of each workload, dtype and quantity, measured ones and those divided by the time."""
    curves: dict[tuple[str, str, str], Curves] = defaultdict(lambda: defaultdict(dict))
    softmax = {each.key: each.point.value for each in record.measurements if each.method == SOFTMAX}
    for each in sorted(record.measurements, key=lambda each: each.n):
        low, value, high = point = each.point
        curves[each.workload, each.dtype, each.quantity][each.method][each.n] = point
        if each.quantity == SECONDS and each.method != RATE:
            faster = None if each.method == SOFTMAX else softmax.get(replace(each, method=SOFTMAX).key)
            for quantity, top in ((SPEED_UP, faster), (SHARE, each.limit), (THROUGHPUT, each.n)):
                if top is not None:
                    ratio = Point(top / high, top / value, top / low)
                    curves[each.workload, each.dtype, quantity][each.method][each.n] = ratio
    return curves


def short(n: float) -> str:
    """Write 65536 as 64k, as contexts are called; 100,000 stays."""
    return f"{n / 1024:,.0f}k" if n >= 1024 and n % 1024 == 0 else f"{n:,.0f}"


class Panel(NamedTuple):
    quantity: str
    view: View
    workload: str
    curves: Curves

    def sentence(self) -> str:
        """Compare the best method with softmax at the greatest length of both, or a map with uniform attention."""
        reference = UNIFORM if self.quantity == ERROR else SOFTMAX
        every = [(x.value, n, method) for method, points in self.curves.items() for n, x in points.items()]
        others = [each for each in every if each[-1] != reference] or every
        lengths, known = {n for _, n, _ in others}, {n: value for value, n, method in every if method == reference}
        if self.quantity == ERROR:
            # uniform attention has no features, so it compares with any number of them
            known = {n: value for value in known.values() for n in lengths}
        else:
            lengths = {max(lengths & known.keys() or lengths)}
        value, n, method = self.view.best(each for each in others if each[1] in lengths)
        told = {method: value} | ({reference: known[n]} if n in known else {})
        words = (self.view.sentence.format(name, self.view.shown(x)) for name, x in told.items())
        return f"{self.workload} at n = {n:,}: {', '.join(words)}"


class Picture(NamedTuple):
    kind: str
    id: str
    title: str
    sentence: str
    panels: list[Panel]


def pictures(record: Record) -> Iterator[Picture]:
    curves = all_curves(record)
    for dtype in dict.fromkeys(each.dtype for each in record.measurements):
        for kind, title, quantities, workloads in PICTURES:
            panels = [
                Panel(quantity, VIEWS[quantity], workload, drawn)
                for workload, quantity in product(workloads, quantities)
                if (drawn := {name: each for name, each in curves[workload, dtype, quantity].items() if name != RATE})
            ]
            if panels:
                sentence = "; ".join(panel.sentence() for panel in panels) + "."
                yield Picture(kind, f"{kind}-{dtype}", f"{title}, {dtype}", sentence, panels)


def printed(record: Record) -> str:
    parts = [record.machine_line, *(f"{title}\n{aligned(rows)}" for title, rows in tables(record))]
    parts += [" ".join(record.notes)] if record.notes else []
    if dropped := dropped_lines(record):
        parts.append("\n".join(["not measured", *dropped]))
    return "\n\n".join(parts)


def tables(record: Record) -> Iterator[tuple[str, Rows]]:
    """Yield titles and rows with the head first: methods down, lengths across."""
    every = all_curves(record)
    for workload, dtype in dict.fromkeys((each.workload, each.dtype) for each in record.measurements):
        for quantity, view in VIEWS.items():
            curves = every[workload, dtype, quantity]
            if curves and quantity != THROUGHPUT:
                ns = sorted({n for points in curves.values() for n in points})
                rows = [[name, *(_text(view, points.get(n)) for n in ns)] for name, points in curves.items()]
                yield f"{workload}, {dtype}: {view.title}{view.spread}", [["", *map(short, ns)], *rows]


def _text(view: View, point: Point | None) -> str:
    if point is None:
        return ""
    spread = f" ±{100 * (point.high - point.low) / point.value:.0f}%" if view.spread else ""
    return view.shown(point.value) + spread


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # names to the left, figures to the right
    lines = ([f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def dropped_lines(record: Record) -> list[str]:
    """Say from which length on each method is missing, those with the same reason in a line."""
    first = {each.curve: each for each in reversed(record.dropped)}
    lines: dict[str, list[str]] = {}
    for each in sorted(first.values(), key=record.dropped.index):
        reason, figure = re.fullmatch(r"(.*?)(?:: ([\d,.]+ \w+))?", each.reason, re.DOTALL).groups()  # pyright: ignore
        line = lines.setdefault(f"{each.workload}, {each.dtype}, from n = {each.n:,} on, {reason}", [])
        line.append(each.method + (f" ({figure})" if figure else ""))
    return [f"{reason}: {', '.join(methods)}" for reason, methods in lines.items()]
