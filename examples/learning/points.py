"""Pictures of what the methods reached in the end: by the size of their state, and by the place in the sequence."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.learning.curves import plt, shown_methods, styles
from examples.learning.task import Task, label
from examples.pictures import save

Run = dict[str, Any]

SILU = "+silu"
HOLLOW = {"markerfacecolor": "none", "linestyle": "--"}


def draw_states(tasks: Sequence[Task], size: Callable[[Task, str], int], runs: Sequence[Run], path: Path) -> None:
    """Draw accuracies against the size of the state, a panel per task; a line joins the sizes of a method. With a SiLU
    it is dashed and has hollow marks."""
    tasks = _run(tasks, runs)
    figure, panels = _panels(tasks, "numbers of state per sequence")
    kinds = dict.fromkeys(_kind(name) for name in shown_methods(tasks, runs))
    style = styles(dict.fromkeys(kind.removesuffix(SILU) for kind in kinds))
    for task, axes in zip(tasks, panels, strict=True):
        for kind in kinds:
            shown = sorted(
                (size(task, run["method"]), 100 * run["accuracy"])
                for run in runs
                if run["task"] == task.name and _kind(run["method"]) == kind and run["seed"] == 0
            )
            if shown:
                name = kind.removesuffix(SILU)
                # a name that begins with a line is not in the legend
                look = {"label": label(name)} if name == kind else {"label": "_", **HOLLOW}
                axes.plot(*zip(*shown, strict=True), linewidth=1, **style[name] | look)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda size, _: f"{size:,.0f}")
    if any(kind.endswith(SILU) for kind in kinds):
        panels[-1].plot([], [], color="black", marker="o", label="hollow: with SiLU", **HOLLOW)
    _save(figure, panels, path)


def draw_places(tasks: Sequence[Task], runs: Sequence[Run], path: Path, *, trained: int, scale: str = "linear") -> None:
    """Draw accuracies against the place in the sequence, a panel per task; training ended at the grey line."""
    tasks = _run(tasks, runs)
    figure, panels = _panels(tasks, "place in the sequence")
    style = styles(shown_methods(tasks, runs))
    for task, axes in zip(tasks, panels, strict=True):
        axes.axvline(trained, color="#bbbbbb", linewidth=6, zorder=0)
        own = {run["method"]: _by_place(run) for run in runs if (run["task"], run["seed"]) == (task.name, 0)}
        for method in shown_methods([task], runs):
            if method in own:
                axes.plot(*zip(*own[method], strict=True), label=label(method), **style[method])
        axes.set_xscale(scale)
        places = sorted({place for points in own.values() for place, _ in points})
        axes.set_xticks(places, [f"{place:,}" for place in places])
        axes.xaxis.minorticks_off()
    _save(figure, panels, path)


def draw_scaling(
    scales: Mapping[str, Callable[[Run], float]],
    points: Callable[[Sequence[Run], Callable[[Run], float]], Mapping[str, Sequence[tuple[float, float]]]],
    fit: Callable[[Sequence[tuple[float, float]]], Callable[[float], float]],
    runs: Sequence[Run],
    path: Path,
) -> None:
    """Draw bits against each scale, a panel each, with both axes logarithmic; the dashed lines are fitted."""
    plt.rcParams["font.size"] = 11
    figure, panels = plt.subplots(1, len(scales), figsize=(10, 4.4), sharey=True, layout="constrained")
    for axes, (title, scale) in zip(panels, scales.items(), strict=True):
        found = points(runs, scale)
        for kind, style in styles(found).items():
            law, (first, *_, last) = fit(found[kind]), [x for x, _ in found[kind]]
            axes.plot(*zip(*found[kind], strict=True), linestyle="none", label=label(kind), **style)
            axes.plot([first, last], [law(first), law(last)], linestyle="--", color=style["color"], linewidth=1)
        axes.set(xlabel=title, xscale="log", yscale="log")
        axes.yaxis.set_major_formatter(lambda bits, _: f"{bits:.1f}")
        axes.yaxis.set_minor_formatter(lambda bits, _: f"{bits:.1f}")
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("bits per byte")
    _save(figure, panels, path)


def _run(tasks: Sequence[Task], runs: Sequence[Run]) -> list[Task]:
    return [task for task in tasks if shown_methods([task], runs)]


def _by_place(run: Run) -> list[tuple[int, float]]:
    """Return the last places of the parts of a sequence that have an accuracy of their own, and these in percent."""
    figures, prefix = run["curve"][-1], "accuracy_"
    return [(int(name.removeprefix(prefix)), 100 * x) for name, x in figures.items() if name.startswith(prefix)]


def _kind(method: str) -> str:
    return method.partition(":")[0]


def _panels(tasks: Sequence[Task], below: str) -> tuple[Any, Any]:
    plt.rcParams["font.size"] = 11
    figure, (panels,) = plt.subplots(
        1, len(tasks), figsize=(4 * len(tasks) + 2, 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    for task, axes in zip(tasks, panels, strict=True):
        axes.set_title(task.title, fontsize=11, loc="left")
        axes.set(xlabel=below, ylim=(-2, 102))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accuracy, % (seed 0)")
    return figure, panels


def _save(figure: Any, panels: Any, path: Path) -> None:
    """Save with one legend of all panels, at the right."""
    shown = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside center right", frameon=False)
    save(figure, path)
    plt.close(figure)
