"""What tables and pictures show: measured quantities and ratios of them, and what they say in a sentence."""

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
    """What a value of 1 means."""

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
     "A straight line of slope 1 is linear, of slope 2 quadratic. Bars go from the fastest run to the upper quartile; "
     "training is forward and backward."),
    ("memory", "Memory against length", ((MEMORY, cases.FORWARD), (MEMORY, cases.TRAINING)),
     "Peak above the inputs, so with outputs and gradients, each in a process of its own; below a few MiB it is mostly "
     "what a process takes anyway."),
    ("speedup", "Speed-up over softmax", ((SPEED_UP, cases.FORWARD), (SPEED_UP, cases.TRAINING)),
     "How many times longer torch's fused softmax attention takes, in the same run. Below 1, softmax is faster."),
    ("share", "Share of the machine's limit", ((SHARE, cases.FORWARD), (SHARE, cases.TRAINING)),
     "The time that the method's own matrix products would take at the rate of batched products of 64 × 64 × 64 in the "
     "same rounds, over the time that it took."),
    ("token", "A generated token", ((TIME, cases.DECODING), (STATE, cases.DECODING), (MEMORY, cases.DECODING)),
     "One token from the state, all heads, against its position n. Softmax reads all that came before, and its cache "
     "grows; the other states do not."),
    ("models", "Complete models: training and prompts",
     ((THROUGHPUT, cases.MODEL_TRAINING), (THROUGHPUT, cases.MODEL_PREFILL)),
     "The default language model but for its attention, one sequence of the length at a time; training has loss, "
     "gradients and AdamW. Higher is better."),
    ("generation", "Complete models: generation",
     ((TIME, cases.MODEL_DECODING), (STATE, cases.MODEL_DECODING), (MEMORY, cases.MODEL_DECODING)),
     "A token at a position of the text, and the memory that the generation keeps beside the weights."),
    ("features", "Feature maps on real queries and keys", ((DISTANCE, features.WORKLOAD),),
     "‖y − y_softmax‖ / ‖y_softmax‖ of causal attention by number of features, the mean over heads and layers; bars "
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

    @property
    def sentence(self) -> str:
        return "; ".join(_sentence(*panel) for panel in self.panels) + "."


def pictures(record: Record) -> Iterator[Picture]:
    for dtype in record.dtypes:
        for name, title, panels, caption in PICTURES:
            found = [Panel(view, workload, view.curves(record, workload, dtype)) for view, workload in panels]
            for panel in found:
                panel.curves.pop(RATE, None)
            if found := [panel for panel in found if panel.curves]:
                yield Picture(f"{name}-{dtype}", f"{title}, {dtype}", caption, found)


def _sentence(view: View, workload: str, curves: Curves) -> str:
    """Compare the best method with softmax at the greatest length of both, and feature maps with uniform attention."""
    reference = features.UNIFORM if view is DISTANCE else SOFTMAX
    known = {point.n: point.value for point in curves.get(reference, ())}
    others = [(x.value, x.n, method) for method, points in curves.items() if method != reference for x in points]
    lengths = {n for _, n, _ in others}
    longest = max(lengths & known.keys() or lengths or known)
    if view is not DISTANCE:
        others = [each for each in others if each[1] == longest]
    value, n, method = view.best(others, default=(known.get(longest), longest, reference))
    said = f"{workload} at n = {n:,}: {view.says.format(method, view.shown(value))}"
    if method != reference and (value := known.get(1 if view is DISTANCE else n)) is not None:
        said += f", {view.says.format(reference, view.shown(value))}"
    return said
