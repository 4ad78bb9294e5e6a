"""Can Linformer and kernels be combined? The talk's last question, with numbers: cost, error, weights, and training.

python -m examples.talk.masked --data input.txt --out runs/masked
python -m examples.talk.lookup --out docs/talk-lookup.jsonl
python -m examples.talk.combined runs/masked --data input.txt --lookup docs/talk-lookup.jsonl --out combined.svg
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from examples.arguments import existing
from examples.learning.run import read
from examples.talk import lookup
from examples.talk.captured import capture, load, parser, texts
from examples.talk.combining import FeaturesOfProjected, ProjectedFeatures
from examples.talk.pictures import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, panels, save, tidy
from linattn import (
    ElementwiseFeatureMap,
    FavorFeatureMap,
    FeatureMap,
    InnerAttention,
    LearnedProjection,
    LinearAttention,
    LinformerAttention,
    MeanPooling,
    SequenceProjection,
    SoftmaxAttention,
    attention_weights,
)

RANKS = (16, 32, 64, 128, 256)
LENGTHS = tuple(2**i for i in range(9, 15))
CHANNELS, PROJECTED, FEATURES, TIMED = 64, 256, 256, 4_096
LABELS = {
    "linear": "kernel: φ = elu + 1",
    "linformer": "Linformer",
    "projected_features": "E φ(K), the talk's",
    "features_of_projected": "φ(E K)",
    "uniform": "mean of all v",
}
STYLES = dict(zip(LABELS, ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PINK, "D"), (BLACK, "")), strict=True))

Call = tuple[Tensor, Tensor, Tensor]


def elu() -> FeatureMap:
    return ElementwiseFeatureMap("elu_plus_one")


def contenders(
    projection: SequenceProjection, feature_map: FeatureMap, for_features: SequenceProjection | None = None
) -> dict[str, InnerAttention]:
    """Each method alone and the two combinations, all with one matrix for keys and values."""
    return {
        "linear": LinearAttention(feature_map),
        "linformer": LinformerAttention(projection),
        "projected_features": ProjectedFeatures(feature_map, for_features or projection),
        "features_of_projected": FeaturesOfProjected(feature_map, projection),
    }


def gaussian(n: int, k: int) -> dict[str, InnerAttention]:
    """E = F ~ N(0, 1/k), where Linformer's training begins."""
    return contenders(LearnedProjection(n, k).requires_grad_(False), elu())


def pooled(n: int, k: int) -> dict[str, InnerAttention]:
    """E = F = means of windows of w tokens, or √w times that, where EᵀE stands between keys and values that are both
    summed: then the talk's weights are not negative either, and their rows sum to one."""
    scaled = LearnedProjection(n, k).requires_grad_(False)
    means, _ = MeanPooling(n, k)(torch.eye(n)[None, None])
    scaled.weight.copy_(means[0, 0] * MeanPooling(n, k).window ** 0.5)
    return contenders(MeanPooling(n, k), elu(), scaled)


def relative(y: Tensor, exact: Tensor) -> Tensor:
    """‖y − exact‖ / ‖exact‖, of all heads together."""
    return (y - exact).norm() / exact.norm()


def errors(calls: Sequence[Call], inners: dict[str, InnerAttention]) -> dict[str, dict[str, float]]:
    """Return the distance of each, and of the mean of all values, from softmax and from the methods alone."""
    outputs = {name: _all(inner, calls) for name, inner in inners.items()}
    outputs["uniform"] = torch.cat([v.mean(-2, keepdim=True).expand_as(q).flatten() for q, _, v in calls])
    exact = {"softmax": _all(SoftmaxAttention(), calls)} | {name: outputs[name] for name in ("linear", "linformer")}
    return {name: {to: relative(y, wanted).item() for to, wanted in exact.items()} for name, y in outputs.items()}


def _all(inner: InnerAttention, calls: Sequence[Call]) -> Tensor:
    return torch.cat([inner(*call).flatten() for call in calls])


def weights(calls: Sequence[Call], inners: dict[str, InnerAttention]) -> dict[str, tuple[float, float, float]]:
    """Return for each the share of its weights for the n tokens that are negative, and the least and largest sum of a
    row."""
    found = {}
    for name, inner in inners.items():
        A = torch.cat([attention_weights(inner, q, k).flatten(0, 1) for q, k, _ in calls])
        sums = A.sum(-1)
        found[name] = ((A < 0).double().mean().item(), sums.min().item(), sums.max().item())
    return found


def cost_contenders(n: int) -> dict[str, InnerAttention]:
    """Return the attentions for n tokens. FAVOR+ has so many features that it may pay to project the keys before."""
    learned, pooled = LearnedProjection(n, PROJECTED), MeanPooling(n, PROJECTED)
    favor = FavorFeatureMap(CHANNELS, FEATURES)
    return {
        "softmax": SoftmaxAttention(),
        **contenders(learned, elu()),
        "favor": LinearAttention(favor),
        "favor_of_pooled": FeaturesOfProjected(favor, pooled),
        "linformer_pooled": LinformerAttention(pooled),
    }


def operations(inner: InnerAttention, n: int) -> float:
    """Count the operations of matrix products per token, on tensors without contents, which take no time and memory."""
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        q, k, v = (torch.empty(1, 1, n, CHANNELS) for _ in range(3))
        with FlopCounterMode(display=False) as counter:
            inner(q, k, v)
    return counter.get_total_flops() / n


@torch.no_grad()
def seconds(inners: dict[str, InnerAttention], n: int, *, rounds: int = 7) -> dict[str, float]:
    """Medians of the processor time of calls that take turns, which other programs change little."""
    inputs = [torch.randn(1, 1, n, CHANNELS) for _ in range(3)]
    times: dict[str, list[float]] = {name: [] for name in inners}
    for round_ in range(rounds + 1):
        for name, inner in inners.items():
            start = time.process_time()
            inner(*inputs)
            if round_:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(column) for name, column in times.items()}


Errors = dict[int, dict[str, dict[str, float]]]


def draw(random: Errors, means: Errors, costs: dict[int, dict[str, float]], runs: Any, path: Path) -> None:
    figure, (row,) = panels(3, width=4.4)
    _errors(row[0], random, means)
    _costs(row[1], costs)
    _bars(row[2], runs)
    save(figure, path)


def _errors(axes: Any, random: Errors, means: Errors) -> None:
    ranks = list(random)
    for name, (colour, marker) in STYLES.items():
        style = {"color": colour, "marker": marker, "markersize": 5}
        axes.plot(ranks, [means[k][name]["softmax"] for k in ranks], **style, label=LABELS[name])
        axes.plot(ranks, [random[k][name]["softmax"] for k in ranks], **style, linestyle=":")
    axes.plot([], [], color=GREY, label="E: means of windows")
    axes.plot([], [], color=GREY, linestyle=":", label="E: Gaussian")
    axes.set(xscale="log", yscale="log", ylim=(0.45, 50))
    axes.set_xticks(ranks, [str(k) for k in ranks])
    axes.minorticks_off()
    axes.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    tidy(axes, xlabel="projected length k", ylabel="‖y − Pv‖ / ‖Pv‖")
    axes.set_title("Error against softmax, n = 512", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _costs(axes: Any, costs: dict[int, dict[str, float]]) -> None:
    lengths = list(costs)
    lines = {
        "softmax": (BLACK, "x", "softmax"),
        **{name: (*STYLES[name], LABELS[name]) for name in STYLES if name != "uniform"},
    }
    for name, (colour, marker, label) in lines.items():
        values = [costs[n][name] / 1e3 for n in lengths]
        # both combinations cost the same
        line = "--" if name == "features_of_projected" else "-"
        axes.plot(lengths, values, color=colour, marker=marker, markersize=5, linestyle=line, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tidy(axes, xlabel="length n", ylabel="thousand operations per token")
    axes.set_title(f"Cost of a head: d = {CHANNELS}, k = {PROJECTED}", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _bars(axes: Any, runs: Sequence[dict[str, Any]]) -> None:
    """Right answers: facts at the same places with full bars, moved with hatched ones."""
    names = list(lookup.ATTENTIONS)
    for place, (task, hatch) in enumerate(zip(lookup.TASKS, ("", "///"), strict=True)):
        found = {run["attention"]: 100 * run["curve"][-1]["accuracy"] for run in runs if run["task"] == task}
        heights = [found.get(name, 0) for name in names]
        at = [i + 0.4 * (place - 0.5) for i in range(len(names))]
        colours = [STYLES.get(name, (GREY, ""))[0] for name in names]
        bars = axes.barh(at, heights, height=0.38, color=colours, hatch=hatch, edgecolor="white")
        axes.bar_label(bars, [f"{x:.1f} %, {task}" for x in heights], padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), [LABELS.get(name, name) for name in names])
    axes.invert_yaxis()
    tidy(axes, xlabel="right answers, %", xlim=(0, 150))
    axes.set_xticks(range(0, 101, 25))
    axes.set_title(f"Recall, n = {lookup.LENGTH}, k = {lookup.PROJECTED}", loc="left", fontsize=10)


def report_errors(by_rank: Errors) -> str:
    lines = ["| k | | against softmax | the kernel alone | Linformer alone |", "|---:|---|---:|---:|---:|"]
    for k, found in by_rank.items():
        for name, row in found.items():
            lines.append(f"| {k} | {LABELS[name]} | " + " | ".join(f"{error:.2f}" for error in row.values()) + " |")
    return "\n".join(lines)


def report_costs(costs: dict[int, dict[str, float]], times: dict[str, float]) -> str:
    head = f"| | operations per token, n = {min(costs)} | n = {max(costs)} | ms, n = {TIMED} |"
    lines = [head, "|---|---:|---:|---:|"]
    for name in times:
        label = LABELS.get(name, name.replace("_", " "))
        lines.append(
            f"| {label} | {costs[min(costs)][name]:,.0f} | {costs[max(costs)][name]:,.0f} | {1e3 * times[name]:.1f} |"
        )
    return "\n".join(lines)


def report_runs(runs: Sequence[dict[str, Any]]) -> str:
    lines = [f"| recall | {' | '.join(lookup.TASKS)} | CPU s |", "|---|" + "---:|" * (1 + len(lookup.TASKS))]
    for name in lookup.ATTENTIONS:
        mine = {run["task"]: run for run in runs if run["attention"] == name}
        right = (f"{100 * mine[task]['curve'][-1]['accuracy']:.1f} %" if task in mine else "" for task in lookup.TASKS)
        spent = " / ".join(f"{mine[task]['cpu_seconds']:.0f}" for task in lookup.TASKS if task in mine)
        lines.append(f"| {LABELS.get(name, name)} | {' | '.join(right)} | {spent} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    line = parser(__doc__, model="a folder of examples.talk.masked", count=4)
    line.add_argument("--lookup", type=existing, required=True, help="the runs of examples.talk.lookup")
    options = line.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = load(options.model)
    calls = [(x.q, x.k, x.v) for x in capture(model, texts(model, options.data, options.texts))]
    n = calls[0][1].shape[-2]
    random, means = ({k: errors(calls, make(n, k)) for k in RANKS} for make in (gaussian, pooled))
    print("E Gaussian", report_errors(random), "E of means", report_errors(means), sep="\n")
    for name, (negative, least, largest) in weights(calls, gaussian(n, PROJECTED)).items():
        print(
            f"{LABELS[name]}: {100 * negative:.0f} % of the weights negative, rows sum to {least:.2f} … {largest:.2f}"
        )
    costs = {n: {name: operations(inner, n) for name, inner in cost_contenders(n).items()} for n in LENGTHS}
    print(report_costs(costs, seconds(cost_contenders(TIMED), TIMED)))
    runs = read(options.lookup)
    print(report_runs(runs))
    draw(random, means, costs, runs, options.out)


if __name__ == "__main__":
    main()
