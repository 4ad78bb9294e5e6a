"""The memory that is saved for the backward pass: n × d × d by naive autograd, a state per token, and n × d by ours.
Katharopoulos et al., https://arxiv.org/abs/2006.16236, section 3.3.1

    python -m examples.talk.gradient_memory --out docs/talk-gradient-memory.svg"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import elu

from examples.pictures import picture
from examples.talk.pictures import BLUE, GREEN, ORANGE, panels, save, tidy
from linattn import causal_linear_attention

CHANNELS = 64
LENGTHS = tuple(2**i for i in range(8, 15))
# a matrix of 16,384² or as many states of 64 × 64 take gigabytes, several times over
LONGEST = {"sums": 8_192, "matrix": 8_192, "ours": 16_384}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_sums(q: Float[Tensor, "n d"], k: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The formula as it is written: all S_i = Σ_{j≤i} φ(k_j) v_jᵀ and z_i."""
    q, k = elu(q) + 1, elu(k) + 1
    S = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(0)
    z = k.cumsum(0)
    return (q.unsqueeze(-2) @ S).squeeze(-2) / (q * z).sum(-1, keepdim=True)


def by_matrix(q: Float[Tensor, "n d"], k: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The same through the matrix of similarities."""
    similarity = ((elu(q) + 1) @ (elu(k) + 1).T).tril()
    return (similarity @ v) / similarity.sum(-1, keepdim=True)


def ours(q: Float[Tensor, "n d"], k: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return causal_linear_attention(q, k, v, feature_map="elu_plus_one")[0]


ATTENTIONS: dict[str, Attention] = {"sums": by_sums, "matrix": by_matrix, "ours": ours}


def inputs(n: int, d: int = CHANNELS) -> list[Tensor]:
    return [torch.randn(n, d, requires_grad=True) for _ in range(3)]


def saved_bytes(attention: Attention, n: int, d: int = CHANNELS) -> int:
    """Return the bytes that autograd holds between forward and backward, with each block counted once."""
    held: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(note, lambda x: x):
        attention(*inputs(n, d))
    return sum(x.untyped_storage().nbytes() for x in held.values())


def peak_bytes(attention: Attention, n: int, d: int = CHANNELS) -> int:
    """By which forward and backward raise the largest memory that this process ever had: for a new process to say."""
    # Windows has none
    import resource

    tensors, upstream = inputs(n, d), torch.ones(n, d)
    # what the first gradient loads is not counted
    small = inputs(64, d)
    torch.autograd.grad(attention(*small), small, torch.ones(64, d))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.autograd.grad(attention(*tensors), tensors, upstream)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)


def peak_of_new_process(name: str, n: int) -> int:
    command = [sys.executable, "-m", "examples.talk.gradient_memory", "--peak", name, str(n)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(lengths: Sequence[int]) -> dict[str, list[tuple[int, int, int]]]:
    """For each way, (n, bytes saved, bytes at the peak)."""
    calls = [(name, n) for name in ATTENTIONS for n in lengths if n <= LONGEST[name]]
    # all peaks first: a process begins with its parent's
    peaks = {(name, n): peak_of_new_process(name, n) for name, n in calls}
    return {
        name: [(n, saved_bytes(attention, n), peaks[name, n]) for other, n in calls if other == name]
        for name, attention in ATTENTIONS.items()
    }


def draw(found: dict[str, list[tuple[int, int, int]]], path: Path) -> None:
    figure, (row,) = panels(2, width=4.6)
    styles = {
        "sums": (ORANGE, "s", "autograd through all S: n × d × d"),
        "matrix": (GREEN, "^", "autograd through the matrix: n × n"),
        "ours": (BLUE, "o", "linattn: n × d"),
    }
    for name, (colour, marker, label) in styles.items():
        n, saved, peak = zip(*found[name], strict=True)
        for axes, figures in zip(row, (saved, peak), strict=True):
            axes.plot(n, [x / 2**20 for x in figures], color=colour, marker=marker, markersize=5, label=label)
    titles = ("Saved for the backward pass", "Peak, above the inputs")
    for axes, title in zip(row, titles, strict=True):
        _label(axes, title)
    row[0].legend(frameon=False, fontsize=9)
    save(figure, path)


def _label(axes: Any, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tidy(axes, xlabel="length n", ylabel="MiB a head")
    axes.set_title(f"{title}; d = {CHANNELS}, float32", loc="left", fontsize=10)
    axes.yaxis.set_minor_formatter("")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=picture, help="the picture")
    parser.add_argument("--peak", nargs=2, metavar=("NAME", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.peak:
        print(peak_bytes(ATTENTIONS[options.peak[0]], int(options.peak[1])))
        return
    found = measure(LENGTHS)
    print("| n | " + " | ".join(f"{name}: saved, MiB | peak, MiB" for name in found) + " |")
    print("|---:" * (1 + 2 * len(found)) + "|")
    for n in LENGTHS:
        rows = [next((row for row in rows if row[0] == n), None) for rows in found.values()]
        cells = (" | " if row is None else f"{row[1] / 2**20:.1f} | {row[2] / 2**20:.1f}" for row in rows)
        print(f"| {n:,} | {' | '.join(cells)} |")
    if options.out is not None:
        draw(found, options.out)


if __name__ == "__main__":
    main()
