"""The report: one HTML file with its pictures in it, which needs no network and no script."""

import json
from collections.abc import Iterator
from html import escape

from linattn.cli.bench.figures import draw, to_svg
from linattn.cli.bench.panels import Picture, pictures
from linattn.cli.bench.record import Record
from linattn.cli.bench.text import dropped_lines, machine_line, tables

STYLE = """
:root { color-scheme: light }
body { background: #fff; color: #1a1a1a; font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
figure { margin: 0 } figcaption { max-width: 60rem; color: #444 }
svg { max-width: 100%; height: auto }
.table { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem }
caption { text-align: left; font-weight: 600; padding: .8rem 0 .3rem }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: right; white-space: nowrap }
th:first-child { text-align: left }
code { background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere }
"""


def html(record: Record) -> str:
    body = "\n".join(_body(record))
    title = escape(f"linattn bench: {record.machine['date'][:10]}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _body(record: Record) -> Iterator[str]:
    yield "<h1>Linear attention, measured</h1>"
    yield f"<p>{escape(machine_line(record))}. Batch {record.options['batch']}, {record.options['heads']} heads of "
    yield f"{record.options['head_dim']} channels, {'' if record.options['causal'] else 'not '}causal. Contenders took "
    yield f"turns; medians of up to {record.options['repeats']} runs, {record.seconds:,.0f} s in all.</p>"
    yield f"<p><code>{escape(record.command)}</code></p>"
    for picture in pictures(record):
        yield _figure(picture, to_svg(draw(picture.panels), picture.name))
    if dropped := dropped_lines(record):
        yield "<h2>Not measured</h2><ul>"
        yield from (f"<li>{escape(line)}</li>" for line in dropped)
        yield "</ul>"
    yield "<h2>All figures</h2>"
    yield from (_table(title, rows) for title, rows in tables(record))
    yield f"<h2>The machine</h2><p><code>{escape(json.dumps(record.machine))}</code></p>"


def _figure(picture: Picture, svg: str) -> str:
    title, text = escape(picture.title), escape(picture.text)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    return f"<h2>{title}</h2>\n<figure>\n{svg}\n<figcaption>{text}</figcaption></figure>"


def _table(title: str, rows: list[list[str]]) -> str:
    head, *rest = rows
    lines = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(text)}</td>' for text in row[1:])}</tr>" for row in rest
    )
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    return f'<div class="table"><table><caption>{escape(title)}</caption><tr>{heads}</tr>{lines}</table></div>'
