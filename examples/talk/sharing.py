"""Linformer's three ways of sharing E and F: what they save, what they lose, and how long they take.

python -m examples.talk.masked --data input.txt --out runs/masked
python -m examples.talk.sharing runs/masked --data input.txt --out docs/talk-sharing.svg

The projections learn to give the outputs of a trained softmax model's layers, on its own queries, keys and values."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from examples.learning.characters import split
from examples.talk import masked
from examples.talk.captured import Captured, capture, load, parser, texts
from examples.talk.pictures import BLUE, GREEN, GREY, ORANGE, PINK, panels, save, tidy
from linattn import InnerAttention, LearnedProjection, LinformerAttention, MeanPooling, SoftmaxAttention

RANKS = (16, 64, 256)
STEPS, BATCH, LEARNING_RATE = 100, 4, 1e-4
SHARINGS = {"none": (GREY, "x"), "headwise": (BLUE, "o"), "key-value": (ORANGE, "s"), "layerwise": (PINK, "D")}


class Result(NamedTuple):
    """The numbers in E and F of all layers; the errors on held-out text before and after learning, and on the text that
    they learned from; the milliseconds of a call."""

    numbers: int
    before: float
    after: float
    seen: float
    milliseconds: float


def make(sharing: str, depth: int, heads: int, n: int, k: int) -> list[InnerAttention]:
    """One attention per layer. Sharing a projection is passing the same object."""

    def projection() -> LearnedProjection:
        return means(LearnedProjection(n, k, num_key_heads=heads if sharing == "none" else None))

    if sharing == "layerwise":
        one = projection()
        return [LinformerAttention(one) for _ in range(depth)]
    if sharing == "key-value":
        return [LinformerAttention(projection()) for _ in range(depth)]
    return [LinformerAttention(projection(), projection()) for _ in range(depth)]


@torch.no_grad()
def means(projection: LearnedProjection) -> LearnedProjection:
    """Start from means of windows of tokens, which is nearer to softmax than a random start."""
    n, k = projection.max_length, projection.projected_length
    projection.weight.copy_(MeanPooling(n, k)(torch.eye(n)[None, None])[0][0, 0])
    return projection


def numbers(inners: Sequence[InnerAttention]) -> int:
    """A projection that several layers share counts once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(inners).parameters())


def error(inners: Sequence[InnerAttention], layers: Sequence[Captured], rows: Tensor | slice = slice(None)) -> Tensor:
    """‖y − Pv‖² / ‖Pv‖², the mean of the layers."""
    total = torch.zeros(())
    for inner, layer in zip(inners, layers, strict=True):
        q, k, v = (x[rows] for x in layer[:3])
        exact = SoftmaxAttention()(q, k, v)
        total = total + (inner(q, k, v) - exact).square().sum() / exact.square().sum()
    return total / len(layers)


@torch.no_grad()
def relative(inners: Sequence[InnerAttention], layers: Sequence[Captured]) -> float:
    """‖y − Pv‖ / ‖Pv‖ on the first eight texts."""
    return error(inners, layers, slice(0, 8)).sqrt().item()


def learn(inners: Sequence[InnerAttention], layers: Sequence[Captured], *, steps: int) -> None:
    optimizer = torch.optim.Adam(nn.ModuleList(inners).parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(layers[0].q), (BATCH,), generator=generator)
        optimizer.zero_grad()
        error(inners, layers, rows).backward()
        optimizer.step()


@torch.no_grad()
def milliseconds(contenders: dict[str, list[InnerAttention]], layers: Sequence[Captured]) -> dict[str, float]:
    """Medians of the processor time of 21 calls of all layers, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(22):
        for name, inners in contenders.items():
            start = time.process_time()
            for inner, layer in zip(inners, layers, strict=True):
                inner(layer.q[:1], layer.k[:1], layer.v[:1])
            if round_:
                times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(column) for name, column in times.items()}


def compare(train: Sequence[Captured], test: Sequence[Captured], k: int) -> dict[str, Result]:
    _, heads, n, _ = train[0].k.shape
    contenders = {sharing: make(sharing, len(train), heads, n, k) for sharing in SHARINGS}
    errors = {}
    for sharing, inners in contenders.items():
        before = relative(inners, test)
        learn(inners, train, steps=STEPS)
        errors[sharing] = before, relative(inners, test), relative(inners, train)
    times = milliseconds(contenders, test)
    return {name: Result(numbers(inners), *errors[name], times[name]) for name, inners in contenders.items()}


def report(found: dict[int, dict[str, Result]]) -> str:
    lines = ["| k | sharing | numbers in E and F | error before | after | on the learned text | ms |"]
    lines.append("|---:|---|---:|---:|---:|---:|---:|")
    for k, results in found.items():
        for name, x in results.items():
            errors = f"{x.before:.3f} | {x.after:.3f} | {x.seen:.3f}"
            lines.append(f"| {k} | {name} | {x.numbers:,} | {errors} | {x.milliseconds:.1f} |")
    return "\n".join(lines)


def draw(found: dict[int, dict[str, Result]], path: Path) -> None:
    figure, (row,) = panels(2)
    ranks = list(found)
    for name, (colour, marker) in SHARINGS.items():
        style = {"color": colour, "marker": marker, "markersize": 6, "label": name}
        after = [found[k][name].after for k in ranks]
        row[0].plot(ranks, after, **style)
        row[1].plot([found[k][name].numbers for k in ranks], after, **style)
    before = [found[k]["none"].before for k in ranks]
    row[0].plot(ranks, before, color=GREEN, linestyle=":", label="means of windows")
    for axes, label in zip(row, ("projected length k", "numbers in E and F of all layers"), strict=True):
        axes.set_xscale("log")
        tidy(axes, xlabel=label, ylabel="‖y − Pv‖ / ‖Pv‖")
    row[0].set_xticks(ranks, [str(k) for k in ranks])
    row[0].minorticks_off()
    row[0].set_title("Error against softmax on held-out text", loc="left", fontsize=10)
    row[1].set_title("The same against what is learned", loc="left", fontsize=10)
    row[0].legend(frameon=False, fontsize=8)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    line: Any = parser(__doc__, model="a folder of examples.talk.masked", count=8)
    options = line.parse_args(arguments)
    torch.set_num_threads(1)
    model = load(options.model)
    seen, _ = masked.masked(masked.windows(split(options.data)[0], 6 * options.texts), masked.rng(1))
    train, test = capture(model, seen), capture(model, texts(model, options.data, options.texts))
    found = {k: compare(train, test, k) for k in RANKS}
    print(report(found))
    draw(found, options.out)


if __name__ == "__main__":
    main()
