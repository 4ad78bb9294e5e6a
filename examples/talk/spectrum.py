"""Is attention low rank? The singular values of P = softmax(QKᵀ/√d), head by head, of a trained model.
Wang et al., Linformer, https://arxiv.org/abs/2006.04768, figure 1

    linattn train input.txt --attention softmax --convolution 0 --dim 128 --batch 8 --minutes 3 \\
        --lr 1e-3 --warmup 0.05 --out runs/causal
    python -m examples.talk.spectrum runs/causal --data input.txt --out docs/talk-spectrum-causal.svg"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from examples.talk.captured import capture, load, parser, texts, untrained
from examples.talk.pictures import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, panels, save, tidy

# the paper's heat map is of the 128th of 512 singular values: a quarter
QUARTER = 4
LAYERS = (BLUE, ORANGE, GREEN, PINK, SKY)


def cumulative(weights: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n"]:
    """Σ_{i≤k} σ_i / Σ_i σ_i for each k, the paper's y-axis. It is k/n if each query looks at a key of its own, and 1
    from the start if all look alike."""
    values = torch.linalg.svdvals(weights)
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def spectra(model: torch.nn.Module, tokens: Tensor) -> Float[Tensor, "layers h n"]:
    """Means over the texts, for each layer and head. One text at a time: its matrices are n × n."""
    means = [torch.stack([cumulative(layer.weights)[0] for layer in capture(model, text)]) for text in tokens.split(1)]
    return torch.stack(means).mean(0)


def needed(curve: Float[Tensor, "*b n"], share: float) -> Float[Tensor, "*b"]:
    """Return the number of the largest singular values that hold such a share of the sum."""
    return (curve < share).sum(-1) + 1


def draw(trained: Tensor, before: Tensor, path: Path) -> None:
    figure, (row,) = panels(2, width=5.2)
    _curves(row[0], trained, before)
    _heat_map(figure, row[1], trained[..., trained.shape[-1] // QUARTER - 1])
    save(figure, path)


def _curves(axes: Any, trained: Tensor, before: Tensor) -> None:
    n = trained.shape[-1]
    index = range(1, n + 1)
    for layer, (heads, colour) in enumerate(zip(trained, LAYERS, strict=False), start=1):
        axes.plot(index, heads.T, color=colour, linewidth=0.6, alpha=0.5)
        axes.plot(index, heads.mean(0), color=colour, linewidth=2, label=f"layer {layer}, mean and heads")
    axes.plot(index, before.flatten(0, 1).mean(0), color=BLACK, linestyle="--", label="before training, mean")
    axes.plot([1, n], [1 / n, 1], color=BLACK, linestyle=":", label="one key for each query")
    axes.axvline(n // QUARTER, color="#888888", linewidth=0.8)
    axes.text(n // QUARTER + n / 100, 0.03, f"{n // QUARTER}", color="#555555", fontsize=9)
    tidy(axes, xlabel="number of largest singular values", ylabel="share of their sum", ylim=(0, 1.02), xlim=(0, n))
    axes.set_title(f"Cumulative singular values of P, n = {n}", loc="left", fontsize=10)
    axes.legend(loc="lower right", frameon=False, fontsize=9)


def _heat_map(figure: Any, axes: Any, share: Float[Tensor, "layers h"]) -> None:
    image = axes.imshow(share.numpy(), cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (layer, head), value in zip(
        torch.cartesian_prod(*map(torch.arange, share.shape)), share.flatten(), strict=True
    ):
        colour = "white" if value < 0.5 else "black"
        axes.text(head, layer, f"{value:.2f}", ha="center", va="center", color=colour)
    axes.set(xlabel="head", ylabel="layer")
    axes.set_xticks(range(share.shape[1]), [str(i + 1) for i in range(share.shape[1])])
    axes.set_yticks(range(share.shape[0]), [str(i + 1) for i in range(share.shape[0])])
    axes.set_title("Share of the largest quarter", loc="left", fontsize=10)
    figure.colorbar(image, ax=axes)


def report(name: str, curves: Tensor) -> str:
    n = curves.shape[-1]
    share = curves[..., n // QUARTER - 1]
    rank = needed(curves, 0.9).float()
    return (
        f"{name:15} largest {n // QUARTER} of {n}: {share.mean():.2f} of the sum (heads {share.min():.2f} to "
        f"{share.max():.2f}); 0.9 of it in {rank.mean():.0f} ({rank.min():.0f} to {rank.max():.0f})"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    folder = "a folder of linattn train or of examples.talk.masked"
    options = parser(__doc__, model=folder, count=16).parse_args(arguments)
    model = load(options.model)
    tokens = texts(model, options.data, options.texts)
    trained, before = spectra(model, tokens), spectra(untrained(model), tokens)
    print(report("trained", trained))
    for layer, heads in enumerate(trained, start=1):
        print(report(f"  layer {layer}", heads))
    print(report("before training", before))
    draw(trained, before, options.out)


if __name__ == "__main__":
    main()
