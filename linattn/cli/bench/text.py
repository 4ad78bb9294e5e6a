"""Figures in words: units, tables for the terminal, and the same rows for the report."""

from collections.abc import Callable, Iterator
from functools import partial

from linattn.cli.bench import features
from linattn.cli.bench.figures import SOFTMAX, short
from linattn.cli.bench.measuring import RATE
from linattn.cli.bench.record import BYTES, ERROR, SECONDS, Measurement, Record

Table = tuple[str, list[list[str]]]
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


def shown(value: float, quantity: str) -> str:
    if quantity == ERROR:
        return f"{value:.3g}"
    units = _SECONDS if quantity == SECONDS else _BYTES
    size, unit = next((each for each in units if value >= each[0]), units[-1])
    return f"{three_digits(value / size)} {unit}"


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def tables(record: Record) -> Iterator[Table]:
    """A title, and rows with the head first: methods down, lengths across."""
    for work, dtype in record.works:
        if times := record.find(SECONDS, work, dtype):
            yield f"{work}, {dtype}: median time a call, ± fastest run to upper quartile", _grid(times, _time)
        if sizes := record.find(BYTES, work, dtype):
            yield f"{work}, {dtype}: peak memory above the inputs", _grid(sizes, lambda each: shown(each.median, BYTES))
        if softmax := {each.n: each.median for each in times.get(SOFTMAX, [])}:
            ours = {method: [each for each in curve if each.n in softmax] for method, curve in times.items()}
            faster = {method: curve for method, curve in ours.items() if curve and method not in (RATE, SOFTMAX)}
            if faster:
                yield f"{work}, {dtype}: times faster than softmax", _grid(faster, partial(_times_faster, softmax))
        if any(each.limit is not None for curve in times.values() for each in curve):
            limits = {method: [each for each in curve if each.limit] for method, curve in times.items()}
            shares = {method: curve for method, curve in limits.items() if curve and method != RATE}
            yield f"{work}, {dtype}: share of the product rate", _grid(shares, _share)
    if errors := record.find(ERROR, features.WORK, "float32"):
        yield (
            "relative error of the output by number of features, median of the draws",
            _grid(errors, lambda each: shown(each.median, ERROR)),
        )


def _time(each: Measurement) -> str:
    """With how far the upper quartile is above the fastest run."""
    return f"{shown(each.median, SECONDS)} ±{100 * (each.high - each.low) / each.median:.0f}%"


def _times_faster(softmax: dict[int, float], each: Measurement) -> str:
    return three_digits(softmax[each.n] / each.median)


def _share(each: Measurement) -> str:
    assert each.limit is not None
    return f"{each.limit / each.median:.2f}"


def _grid(curves: dict[str, list[Measurement]], cell: Callable[[Measurement], str]) -> list[list[str]]:
    ns = sorted({each.n for curve in curves.values() for each in curve})
    rows = [["", *(short(n) for n in ns)]]
    for method, curve in curves.items():
        by_n = {each.n: cell(each) for each in curve}
        rows.append([method, *(by_n.get(n, "") for n in ns)])
    return rows


def aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (f"  {text:>{width}}" for text, width in zip(row[1:], widths[1:], strict=True))
        lines.append((f"{row[0]:<{widths[0]}}" + "".join(cells)).rstrip())
    return "\n".join(lines)


def machine_line(record: Record) -> str:
    machine = record.machine
    where = machine.get("gpu") or f"{machine['processor']}, {machine['threads']} of {machine['cores']} threads"
    return f"{where}, torch {machine['torch']}, linattn {machine['linattn']}, {machine['date']}"


def dropped_lines(record: Record) -> list[str]:
    """Of each contender that ended early the first length that is missing; those with the same reason in a line."""
    first = {(each.work, each.method, each.dtype): each for each in reversed(record.dropped)}
    lines: dict[str, list[str]] = {}
    for each in sorted(first.values(), key=record.dropped.index):
        reason, _, figure = each.reason.partition(":")
        line = lines.setdefault(f"{each.work}, {each.dtype}, from n = {each.n:,} on, {reason}", [])
        line.append(each.method + (f" ({figure.strip()})" if figure else ""))
    return [f"{reason}: {', '.join(methods)}" for reason, methods in lines.items()]


def printed(record: Record) -> str:
    parts = [machine_line(record)]
    parts += [f"{title}\n{aligned(rows)}" for title, rows in tables(record)]
    if record.notes:
        parts.append(" ".join(record.notes))
    if dropped := dropped_lines(record):
        parts.append("not measured\n" + "\n".join(dropped))
    return "\n\n".join(parts)
