"""Theorem 1 of Linformer, measured: how far P RᵀR v is from P v for a Gaussian R of k rows, beside what is promised.
Wang et al., https://arxiv.org/abs/2006.04768, section 3 and appendix A

    python -m examples.talk.theorem runs/masked --data input.txt --out docs/talk-theorem.svg

The theorem promises ‖P RᵀR v − P v‖ ≤ ε ‖P v‖ with high probability for k = 5 ln n / (ε² − ε³). Its lemma bounds the
error of an inner product x·y by ε |x·y|, but the mean square of that error is (‖x‖²‖y‖² + (x·y)²) / k."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from examples.talk.captured import Captured, capture, load, parser, texts
from examples.talk.pictures import BLACK, BLUE, GREEN, ORANGE, panels, save, tidy

RANKS = (4, 8, 16, 32, 64, 128, 256, 512)
LENGTHS = (64, 128, 256, 512)
EPSILON = 0.5
# the factor 1/(ε² − ε³) is smallest here: no larger ε comes at a smaller k
WIDEST = 2 / 3


def projected(
    P: Float[Tensor, "*b n n"], v: Float[Tensor, "*b n d"], k: int, generator: torch.Generator | None = None
) -> Float[Tensor, "*b n d"]:
    """P RᵀR v with R_kj ~ N(0, 1/k), for one R."""
    R = torch.randn(k, v.shape[-2], generator=generator, dtype=v.dtype) / math.sqrt(k)
    return P @ (R.T @ (R @ v))


def truncated(P: Float[Tensor, "*b n n"], v: Float[Tensor, "*b n d"], k: int) -> Float[Tensor, "*b n d"]:
    """P_k v with the k largest singular values of P: no other matrix of rank k is as near to P."""
    U, s, Vh = torch.linalg.svd(P)
    return U[..., :k] @ (s[..., :k, None] * (Vh[..., :k, :] @ v))


def relative_error(y: Float[Tensor, "*b n d"], exact: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d"]:
    """‖y − Pv‖ / ‖Pv‖ of each column."""
    return torch.linalg.vector_norm(y - exact, dim=-2) / torch.linalg.vector_norm(exact, dim=-2)


def spread(P: Float[Tensor, "*b n n"], v: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b d"]:
    """‖P‖_F² ‖v‖² / ‖Pv‖² + 1: the mean square of the relative error is exactly this over k."""
    size = P.square().sum((-2, -1)).unsqueeze(-1) * v.square().sum(-2)
    return size / (P @ v).square().sum(-2) + 1


def promised_rank(n: int, epsilon: float = EPSILON) -> float:
    return 5 * math.log(n) / (epsilon**2 - epsilon**3)


def promised_error(n: int, k: int) -> float | None:
    """The smallest ε whose rank is k; None below the smallest rank that promises anything."""
    if promised_rank(n, WIDEST) > k:
        return None
    low, high = 0.0, WIDEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if middle > 0 and promised_rank(n, middle) <= k else (middle, high)
    return high


def promised_probability(n: int, k: int, epsilon: float = EPSILON) -> float:
    """1 − 2n exp(−(ε² − ε³) k / 4), the proof's last line."""
    return 1 - 2 * n * math.exp(-(epsilon**2 - epsilon**3) * k / 4)


def errors(layers: Sequence[Captured], ranks: Sequence[int], *, draws: int = 5) -> dict[str, list[Tensor]]:
    """For each rank, relative errors of all columns of all heads: of random R, and of the best matrix of that rank."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[Tensor]] = {"random": [], "expected": [], "best": []}
    pairs = [(layer.weights, layer.v.double()) for layer in layers]
    for k in ranks:
        random = [relative_error(projected(P, v, k, generator), P @ v) for P, v in pairs for _ in range(draws)]
        found["random"].append(torch.cat([x.flatten() for x in random]))
        found["expected"].append(torch.cat([(spread(P, v) / k).sqrt().flatten() for P, v in pairs]))
        found["best"].append(torch.cat([relative_error(truncated(P, v, k), P @ v).flatten() for P, v in pairs]))
    return found


def ranks_needed(model: torch.nn.Module, tokens: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """For texts cut to each length, the k at which the root mean square error is ε, for all columns of all heads."""
    return [
        torch.cat(
            [
                (spread(layer.weights, layer.v.double()) / EPSILON**2).flatten()
                for layer in capture(model, tokens[:, :n])
            ]
        )
        for n in lengths
    ]


def draw(
    found: dict[str, list[Tensor]], ranks: Sequence[int], needed: list[Tensor], lengths: Sequence[int], path: Path
):
    figure, (row,) = panels(2, width=5.2)
    _errors(row[0], found, ranks, lengths[-1])
    _growth(row[1], needed, lengths)
    save(figure, path)


def _band(axes: Any, x: Sequence[int], values: list[Tensor], colour: str, marker: str, label: str) -> None:
    low, middle, high = torch.stack([v.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=v.dtype)) for v in values]).T
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(x, middle, color=colour, marker=marker, markersize=5, label=label)


def _errors(axes: Any, found: dict[str, list[Tensor]], ranks: Sequence[int], n: int) -> None:
    _band(axes, ranks, found["random"], BLUE, "o", "P RᵀR, measured: median, 80 % of columns")
    axes.plot(
        ranks, [e.median() for e in found["expected"]], color=BLACK, linestyle=":", label="root mean square, exact"
    )
    _band(axes, ranks, found["best"], GREEN, "^", "best matrix of rank k (SVD)")
    fine = [k for k in range(1, max(ranks) + 1) if promised_error(n, k) is not None]
    axes.plot(fine, [promised_error(n, k) for k in fine], color=ORANGE, linewidth=2, label="promised by Theorem 1")
    axes.axhline(1, color="#888888", linewidth=0.8)
    axes.text(min(ranks), 1.08, "error of answering zero", fontsize=8, color="#555555")
    axes.set(xscale="log", yscale="log", ylim=(0.01, 20))
    axes.set_xticks(ranks, [str(k) for k in ranks])
    axes.minorticks_off()
    tidy(axes, xlabel="rank k", ylabel="‖P̃v − Pv‖ / ‖Pv‖")
    axes.set_title(f"Error against k, n = {n}", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def _growth(axes: Any, needed: list[Tensor], lengths: Sequence[int]) -> None:
    _band(axes, lengths, needed, BLUE, "o", "needed: median, 80 % of columns")
    promised = [promised_rank(n) for n in lengths]
    axes.plot(lengths, promised, color=ORANGE, linewidth=2, label="promised by Theorem 1, Θ(log n)")
    axes.plot(lengths, lengths, color="#888888", linestyle="--", label="k = n: nothing saved")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    tidy(axes, xlabel="length n", ylabel="k")
    axes.set_title(f"k for a relative error of {EPSILON}", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def report(found: dict[str, list[Tensor]], ranks: Sequence[int], needed: list[Tensor], lengths: Sequence[int]) -> str:
    n = lengths[-1]
    lines = ["| k | promised | measured, median | 9 in 10 below | exact root mean square, median | best of rank k |"]
    lines.append("|---:|---:|---:|---:|---:|---:|")
    for k, random, expected, best in zip(ranks, found["random"], found["expected"], found["best"], strict=True):
        promise = promised_error(n, k)
        cells = [f"{x:.2f}" for x in (random.median(), random.quantile(0.9), expected.median(), best.median())]
        lines.append(f"| {k} | {'none' if promise is None else f'{promise:.2f}'} | {' | '.join(cells)} |")
    lines += [
        "",
        f"| n | k promised for {EPSILON} | k needed, median | by a tenth of the columns |",
        "|---:|---:|---:|---:|",
    ]
    for length, k in zip(lengths, needed, strict=True):
        lines.append(f"| {length} | {promised_rank(length):.0f} | {k.median():.0f} | {k.quantile(0.9):.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, model="a folder of examples.talk.masked", count=4).parse_args(arguments)
    model = load(options.model)
    tokens = texts(model, options.data, options.texts)
    found, needed = errors(capture(model, tokens), RANKS), ranks_needed(model, tokens, LENGTHS)
    print(report(found, RANKS, needed, LENGTHS))
    draw(found, RANKS, needed, LENGTHS, options.out)


if __name__ == "__main__":
    main()
