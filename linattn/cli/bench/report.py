"""The report: one HTML file with its pictures in it, which needs no network and no script; and the tables as text."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import Environment

from linattn.cli.bench.figures import draw, short, styles
from linattn.cli.bench.record import Record
from linattn.cli.bench.views import TABLES, TIME, Point, View, pictures

Rows = list[list[str]]


def html(record: Record) -> str:
    style = styles(dict.fromkeys(each.method for each in record.measurements))
    template = Environment(autoescape=True).from_string(Path(__file__).with_name("report.html").read_text("utf-8"))
    return template.render(
        record=record,
        machine=machine_line(record),
        details=json.dumps(record.machine),
        pictures=[(picture, draw(picture, style)) for picture in pictures(record)],
        dropped=dropped_lines(record),
        tables=list(tables(record)),
    )


def printed(record: Record) -> str:
    parts = [machine_line(record), *(f"{title}\n{aligned(rows)}" for title, rows in tables(record))]
    parts += [" ".join(record.notes)] if record.notes else []
    if dropped := dropped_lines(record):
        parts.append("\n".join(["not measured", *dropped]))
    return "\n\n".join(parts)


def tables(record: Record) -> Iterator[tuple[str, Rows]]:
    """Yield titles and rows with the head first: methods down, lengths across."""
    for workload, dtype in dict.fromkeys((each.workload, each.dtype) for each in record.measurements):
        for view in TABLES:
            if curves := view.curves(record, workload, dtype):
                ns = sorted({point.n for points in curves.values() for point in points})
                rows = [["", *map(short, ns)]]
                for method, points in curves.items():
                    texts = {point.n: _text(view, point) for point in points}
                    rows.append([method, *(texts.get(n, "") for n in ns)])
                spread = ", ± fastest run to upper quartile" if view is TIME else ""
                yield f"{workload}, {dtype}: {view.title}{spread}", rows


def _text(view: View, point: Point) -> str:
    spread = f" ±{100 * (point.high - point.low) / point.value:.0f}%" if view is TIME else ""
    return view.shown(point.value) + spread


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # names to the left, figures to the right
    lines = ([f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def machine_line(record: Record) -> str:
    machine = record.machine
    where = machine.get("gpu") or f"{machine['processor']}, {machine['threads']} of {machine['cores']} threads"
    return f"{where}, torch {machine['torch']}, linattn {machine['linattn']}, {machine['date']}"


def dropped_lines(record: Record) -> list[str]:
    """Say from which length on each method is missing, those with the same reason in a line."""
    first = {(each.workload, each.method, each.dtype): each for each in reversed(record.dropped)}
    lines: dict[str, list[str]] = {}
    for each in sorted(first.values(), key=record.dropped.index):
        reason, _, figure = each.reason.partition(":")
        line = lines.setdefault(f"{each.workload}, {each.dtype}, from n = {each.n:,} on, {reason}", [])
        line.append(each.method + (f" ({figure.strip()})" if figure else ""))
    return [f"{reason}: {', '.join(methods)}" for reason, methods in lines.items()]
