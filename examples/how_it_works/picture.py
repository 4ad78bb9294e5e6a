"""Draw how chunks and states replace the matrix of similarities. The colours suit light and dark pages.

python -m examples.how_it_works.picture --out docs/how-it-works.svg"""

import argparse
from pathlib import Path

CHUNKS, SIZE, TOP, LEFT, RIGHT = 4, 52, 46, 24, 300
BLUE, ORANGE, GREY = "#3b82c4", "#d9822b", "#808890"


def rectangle(x: float, y: float, width: float, height: float, fill: str, opacity: float = 0.25) -> str:
    box = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {box} fill="{fill}" fill-opacity="{opacity}" stroke="{fill}"/>'


def triangle(x: float, y: float, size: float) -> str:
    return f'<path d="M{x} {y} v{size} h{size} z" fill="{BLUE}" fill-opacity="0.6" stroke="{BLUE}"/>'


def label(x: float, y: float, words: str, fill: str = GREY, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}">{words}</text>'


def arrow(x: float, y: float, length: float, colour: str, *, down: bool = False) -> str:
    line, head = (f"v{length}", "l-4 -7 h8 z") if down else (f"h{length}", "l-7 -4 v8 z")
    end = (x, y + length) if down else (x + length, y)
    return (
        f'<path d="M{x} {y} {line}" stroke="{colour}" stroke-width="2" fill="none"/>'
        f'<path d="M{end[0]} {end[1]} {head}" fill="{colour}"/>'
    )


def matrix() -> list[str]:
    """Draw the lower triangle of A, cut into chunks: triangles on the diagonal, full blocks below it."""
    side = CHUNKS * SIZE
    parts = [
        label(LEFT + side / 2, TOP - 26, "the matrix A = q kᵀ ∘ D, n × n"),
        label(LEFT + side / 2, TOP - 8, "keys"),
    ]
    for i in range(CHUNKS):
        parts += [rectangle(LEFT + j * SIZE, TOP + i * SIZE, SIZE, SIZE, ORANGE) for j in range(i)]
        parts.append(triangle(LEFT + i * SIZE, TOP + i * SIZE, SIZE))
    middle = TOP + side / 2
    turn = f'transform="rotate(-90 {LEFT - 8} {middle})"'
    return [*parts, f"<g {turn}>{label(LEFT - 8, middle, 'queries')}</g>"]


def chain() -> list[str]:
    """Draw the chunks in a row, with the state that each hands on to the next."""
    parts, step = [label(RIGHT + 215, TOP - 26, "the same sums, chunk by chunk")], SIZE + 54
    for i in range(CHUNKS):
        x, y = RIGHT + 34 + i * step, TOP + 52
        parts += [
            triangle(x, y, SIZE),
            arrow(x - 46, y + SIZE / 2, 40, ORANGE),
            label(x - 28, y + 18, f"S{chr(0x2080 + i)}", ORANGE),
        ]
        parts += [arrow(x + SIZE / 2, y - 34, 28, GREY, down=True), label(x + SIZE / 2, y - 40, "q, k, v")]
        parts += [arrow(x + SIZE / 2, y + SIZE + 6, 28, GREY, down=True), label(x + SIZE / 2, y + SIZE + 50, "y")]
    x, y = RIGHT + 34 + CHUNKS * step, TOP + 52
    parts += [arrow(x - 46, y + SIZE / 2, 40, ORANGE), label(x - 28, y + 18, f"S{chr(0x2080 + CHUNKS)}", ORANGE)]
    blue, orange = TOP + 184, TOP + 204
    parts.append(label(RIGHT, blue, "blue: inside a chunk, C × C similarities, as in the definition", BLUE, "start"))
    parts.append(
        label(RIGHT, orange, "orange: pairs of chunks, replaced by a state of d × dv numbers", ORANGE, "start")
    )
    return parts


def picture() -> str:
    body = "\n".join([*matrix(), *chain()])
    title = "<title>The matrix of similarities, and the same sums by chunks and states</title>"
    box = 'viewBox="0 0 800 270" width="800" height="270"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="13">'
    return "\n".join([head, title, body, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.parse_args().out.write_text(picture(), "utf-8")


if __name__ == "__main__":
    main()
