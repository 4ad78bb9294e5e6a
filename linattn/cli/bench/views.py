"""The contents of tables and pictures: measured quantities, ratios of them, and a sentence on each."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from linattn.cli.bench import cases, features
from linattn.cli.bench.cases import RATE, SOFTMAX
from linattn.cli.bench.record import BYTES, ERROR, SECONDS, STATE_BYTES, Measurement, Record

UNITS = {
    SECONDS: ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs")),
    BYTES: ((2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " bytes")),
}
UNITS[STATE_BYTES] = UNITS[BYTES]


class Point(NamedTuple):
    n: int
    value: float
    low: float
    high: float


Curves = dict[str, list[Point]]


def shown(value: float, quantity: str = "") -> str:
    """Return three digits, with a unit if the quantity has one."""
    units = UNITS.get(quantity, ((1.0, ""),))
    size, unit = next((each for each in units if value >= each[0]), units[-1])
    return f"{value / size:,.0f}{unit}" if value / size >= 99.95 else f"{value / size:.3g}{unit}"


class View(NamedTuple):
    """A measured quantity or, with `over`, that divided by the measured seconds."""

    title: str
    quantity: str
    says: str
    best: Callable[..., Any] = min
    over: Callable[[Measurement, dict[int, float]], float | None] | None = None
    """Takes a measurement, and softmax's median at each length."""
    line: str = ""
    """The meaning of a value of 1."""

    def curves(self, record: Record, workload: str, dtype: str) -> Curves:
        found = record.find(self.quantity, workload, dtype)
        softmax = {each.n: each.median for each in found.get(SOFTMAX, ())}
        points = {method: [self._point(x, softmax) for x in measured] for method, measured in found.items()}
        return {method: kept for method, each in points.items() if (kept := [x for x in each if x is not None])}

    def _point(self, each: Measurement, softmax: dict[int, float]) -> Point | None:
        if self.over is None:
            return Point(each.n, each.median, each.low, each.high)
        top = self.over(each, softmax)
        return None if top is None else Point(each.n, top / each.median, top / each.high, top / each.low)

    def shown(self, value: float) -> str:
        return shown(value, "" if self.over else self.quantity)


def _speed_up(each: Measurement, softmax: dict[int, float]) -> float | None:
    return None if each.method in (RATE, SOFTMAX) else softmax.get(each.n)


TIME = View("median time per call", SECONDS, "{} takes {}")
MEMORY = View("peak memory above the inputs", BYTES, "{} needs {}")
STATE = View("size of the state", STATE_BYTES, "the state of {} has {}")
SPEED_UP = View("times faster than softmax", SECONDS, "{} is {} times as fast as softmax", max, _speed_up, "softmax")
SHARE = View("share of the product rate", SECONDS, "{} reaches {}", max, lambda x, _: x.limit, "64³ products")
THROUGHPUT = View("tokens per second", SECONDS, "{} reads {} tokens per second", max, lambda x, _: x.n)
DISTANCE = View("relative error of the output", ERROR, "{} is {} away from softmax")
TABLES = (TIME, MEMORY, STATE, SPEED_UP, SHARE, DISTANCE)

PICTURES = (
    ("time", "Time against length", ((TIME, cases.FORWARD), (TIME, cases.TRAINING)),
     "Slope 1 is linear, 2 quadratic. Bars go from the fastest run to the upper quartile; training includes forward."),
    ("memory", "Memory against length", ((MEMORY, cases.FORWARD), (MEMORY, cases.TRAINING)),
     "With outputs and gradients, each in a process of its own; a few MiB are what a process takes anyway."),
    ("speedup", "Speed-up over softmax", ((SPEED_UP, cases.FORWARD), (SPEED_UP, cases.TRAINING)),
     "How many times longer torch's fused softmax attention takes, in the same run. Below 1, softmax is faster."),
    ("share", "Share of the machine's limit", ((SHARE, cases.FORWARD), (SHARE, cases.TRAINING)),
     "The time of the method's own matrix products at the rate of batched 64³ products, over the time that it took."),
    ("token", "A generated token", tuple((view, cases.DECODING) for view in (TIME, STATE, MEMORY)),
     "One token from the state at position n. Softmax reads a cache that grows; the other states do not grow."),
    ("models", "Complete models: training and prompts",
     ((THROUGHPUT, cases.MODEL_TRAINING), (THROUGHPUT, cases.MODEL_PREFILL)),
     "The default model but for its attention, one sequence at a time; training has loss, gradients and AdamW."),
    ("generation", "Complete models: generation", tuple((view, cases.MODEL_DECODING) for view in (TIME, STATE, MEMORY)),
     "A token at position n of the text, and the memory that the generation keeps beside the weights."),
    ("features", "Feature maps on real queries and keys", ((DISTANCE, features.WORKLOAD),),
     "‖y − y_softmax‖ / ‖y_softmax‖ of causal attention by number of features n, the mean over heads and layers; bars "
     "span the draws of a random map. What is not below the dotted line is no approximation of softmax, and what is "
     "far above it leaves the picture. A model that learns with a feature map need not imitate softmax."),
)  # fmt: skip


class Panel(NamedTuple):
    view: View
    workload: str
    curves: Curves


class Picture(NamedTuple):
    name: str
    title: str
    caption: str
    panels: list[Panel]
    sentence: str


def pictures(record: Record) -> Iterator[Picture]:
    for dtype in dict.fromkeys(each.dtype for each in record.measurements):
        for name, title, shown_here, caption in PICTURES:
            panels = [Panel(view, workload, view.curves(record, workload, dtype)) for view, workload in shown_here]
            for panel in panels:
                panel.curves.pop(RATE, None)
            if panels := [panel for panel in panels if panel.curves]:
                sentence = "; ".join(_sentence(*panel) for panel in panels) + "."
                yield Picture(f"{name}-{dtype}", f"{title}, {dtype}", caption, panels, sentence)


def _sentence(view: View, workload: str, curves: Curves) -> str:
    """Compare the best method with softmax at the greatest length of both, and feature maps with uniform attention."""
    reference = features.UNIFORM if view is DISTANCE else SOFTMAX
    known = {x.n: x.value for x in curves.get(reference, ())}
    others = [(x.value, x.n, method) for method, points in curves.items() if method != reference for x in points]
    lengths = {n for _, n, _ in others}
    if view is DISTANCE:
        # uniform attention has no features, so it compares with any number of them
        known = {n: value for value in known.values() for n in lengths}
    else:
        longest = max(lengths & known.keys() or lengths or known)
        others = [each for each in others if each[1] == longest]
    value, n, method = view.best(others, default=(0.0, max(known, default=0), reference))
    told = {method: value} | ({reference: known[n]} if n in known else {})
    return f"{workload} at n = {n:,}: " + ", ".join(view.says.format(name, view.shown(x)) for name, x in told.items())
