"""Which pictures there are, what is in each, and how to read it."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from linattn.cli.bench import cells, features
from linattn.cli.bench.figures import SOFTMAX, Panel, Points
from linattn.cli.bench.measuring import RATE
from linattn.cli.bench.record import BYTES, ERROR, SECONDS, Measurement, Record

Curves = dict[str, Points]
MILLI, MICRO, MEBI = 1e3, 1e6, 2.0**-20
TOKENS, POSITION = "tokens n (k = 1,024)", "position (k = 1,024)"


class Picture(NamedTuple):
    name: str
    title: str
    text: str
    panels: list[Panel]


def pictures(record: Record) -> Iterator[Picture]:
    for dtype in record.dtypes:
        yield from (picture for picture in _of_dtype(record, dtype) if picture.panels)
    if errors := record.find(ERROR, features.WORK, "float32"):
        yield _errors(record, errors)


def _of_dtype(record: Record, dtype: str) -> Iterator[Picture]:
    both = (cells.FORWARD, cells.TRAINING)

    def picture(name: str, title: str, text: str, panels: list[Panel | None]) -> Picture:
        found = [panel for panel in panels if panel is not None]
        return Picture(f"{name}-{dtype}", f"{title}, {dtype}", text, found)

    yield picture(
        "time", "Time against length", "A straight line of slope 1 is linear, of slope 2 quadratic. Bars go from the "
        "fastest run to the upper quartile; training is forward and backward.",
        [_panel(record, SECONDS, work, dtype, _scaled(MILLI), "milliseconds a call") for work in both],
    )  # fmt: skip
    yield picture(
        "memory", "Memory against length", "Peak above the inputs, so with output and gradients, each in a process of "
        "its own; below a few MiB it is mostly what a process takes anyway.",
        [_panel(record, BYTES, work, dtype, _scaled(MEBI), "MiB above the inputs") for work in both],
    )  # fmt: skip
    yield picture(
        "speedup", "Speed-up over softmax", "How many times longer torch's fused softmax attention takes, in the same "
        "run. Below 1, softmax is faster.",
        [_speed_up(record, work, dtype) for work in both],
    )  # fmt: skip
    yield picture(
        "share", "Share of the machine's limit", "The time that the method's own matrix products would take at the "
        "rate of batched products of 64 × 64 × 64 in the same rounds, over the time that it took.",
        [_share(record, work, dtype) for work in both],
    )  # fmt: skip
    yield picture(
        "token", "A generated token against its position", "One token from the state, all heads. Softmax reads all "
        "that came before, and its cache grows; the others' states do not.",
        [_panel(record, SECONDS, cells.DECODING, dtype, _scaled(MICRO), "microseconds a token", POSITION),
         _panel(record, BYTES, cells.DECODING, dtype, _scaled(MEBI), "MiB for state and token", POSITION)],
    )  # fmt: skip
    yield picture(
        "models", "Whole models: training and prompts", "The default language model but for its attention, one "
        "sequence of the length at a time; training has loss, gradients and AdamW. Higher is better.",
        [_panel(record, SECONDS, work, dtype, _tokens_per_second, "tokens a second")
         for work in (cells.MODEL_TRAINING, cells.MODEL_PREFILL)],
    )  # fmt: skip
    yield picture(
        "generation", "Whole models: generation", "A token at a position of the text, and the memory of the generation "
        "above the weights.",
        [_panel(record, SECONDS, cells.MODEL_DECODING, dtype, _scaled(MILLI), "milliseconds a token", POSITION),
         _panel(record, BYTES, cells.MODEL_DECODING, dtype, _scaled(MEBI), "MiB above the weights", POSITION)],
    )  # fmt: skip


def _scaled(factor: float) -> Callable[[Measurement, float], float]:
    return lambda measurement, value: value * factor


def _tokens_per_second(measurement: Measurement, seconds: float) -> float:
    return measurement.n / seconds


def _panel(
    record: Record,
    quantity: str,
    work: str,
    dtype: str,
    value: Callable[[Measurement, float], float],
    unit: str,
    x_label: str = TOKENS,
) -> Panel | None:
    curves: Curves = {}
    for method, curve in record.find(quantity, work, dtype).items():
        # a peak that did not rise above the inputs has no place on a logarithmic axis
        points = [_point(each, value) for each in curve if each.low > 0]
        if method != RATE and points:
            curves[method] = points
    return Panel(work, x_label, unit, curves) if curves else None


def _point(each: Measurement, value: Callable[[Measurement, float], float]) -> tuple[float, float, float, float]:
    low, high = sorted((value(each, each.low), value(each, each.high)))
    return each.n, value(each, each.median), low, high


def _speed_up(record: Record, work: str, dtype: str) -> Panel | None:
    found = record.find(SECONDS, work, dtype)
    softmax = {each.n: each.median for each in found.get(SOFTMAX, [])}
    curves: Curves = {}
    for method, curve in found.items():
        points = [
            (each.n, softmax[each.n] / each.median, softmax[each.n] / each.high, softmax[each.n] / each.low)
            for each in curve
            if each.n in softmax
        ]
        if method not in (RATE, SOFTMAX) and points:
            curves[method] = points
    line = (1.0, "as fast as softmax")
    return Panel(work, TOKENS, "times faster than softmax", curves, line_at=line) if curves else None


def _share(record: Record, work: str, dtype: str) -> Panel | None:
    curves: Curves = {}
    for method, curve in record.find(SECONDS, work, dtype).items():
        points = [
            (each.n, each.limit / each.median, each.limit / each.high, each.limit / each.low)
            for each in curve
            if each.limit is not None
        ]
        if method != RATE and points:
            curves[method] = points
    if not curves:
        return None
    return Panel(work, TOKENS, "share of the product rate", curves, y_is_log=False, line_at=(1.0, "64³ products"))


def _errors(record: Record, found: dict[str, list[Measurement]]) -> Picture:
    uniform = found[features.UNIFORM][0].median
    curves: Curves = {
        method: [(each.n, each.median, each.low, max(each.values)) for each in curve]
        for method, curve in found.items()
        if method != features.UNIFORM
    }
    top = 1.5 * uniform
    lowest = min(value for points in curves.values() for _, value, *_ in points)
    beyond = [method for method, points in curves.items() if min(value for _, value, *_ in points) > top]
    text = (
        "‖y − y_softmax‖ / ‖y_softmax‖ of causal attention, the mean over heads and layers; bars span the draws of a "
        "random map. What is not below the dotted line is no approximation of softmax: a model that learns with a "
        "feature map need not be one. " + " ".join(record.notes)
    )
    if beyond:
        text += f" Beyond the picture's upper edge, larger than {top:.2g}: {', '.join(beyond)}."
    panel = Panel(
        "causal attention, mean over heads and layers",
        "number of features (k = 1,024)",
        "relative error of the output",
        {method: points for method, points in curves.items() if method not in beyond},
        y_is_log=lowest < top / 10,
        line_at=(uniform, features.UNIFORM),
        top=top,
    )
    return Picture("features", "Feature maps on real queries and keys", text, [panel])
