"""The reports of a run in training: lines of JSON, a progress bar, or lines if there is no terminal, and a plot."""

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from linattn.cli.run_folder import Run
from linattn.cli.schedule import Schedule
from linattn.console.trackers import Trackers
from linattn.files import atomic_file

# the bar counts progress from 0 to 1, which also gives a remaining time where --minutes ends the run
BAR = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
SUMMARY = {
    "step": "step {:,}",
    "training_bits_per_byte": "training {:.3f} bits/byte",
    "validation_bits_per_byte": "validation {:.3f} bits/byte",
    "tokens_per_second": "{:,} tokens/s",
}
CURVES = {"training": {"linewidth": 0.8, "alpha": 0.6}, "validation": {"marker": "o", "markersize": 4}}


class Reports(TrainerCallback):
    """Reports from the first process only. Losses are in nats per token; bits per byte allow comparing tokenizers."""

    def __init__(self, run: Run, schedule: Schedule, track: Sequence[str], *, tokens_per_step: int) -> None:
        self.run, self.schedule, self.tokens_per_step = run, schedule, tokens_per_step
        self.tokens_per_byte = {name: part["tokens"] / part["bytes"] for name, part in run.description["data"].items()}
        self.track = track
        self.step_seconds, self.last_step, self.step_started, self.first_progress = 0.0, 0, 0.0, 0.0
        self.last: dict[str, Any] = {}
        self.bar: tqdm | None = None
        self.trackers: Trackers | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # a checkpoint brings the steps between reports that its process was given
        state.compute_steps(args, state.max_steps)
        self.last_step = state.global_step
        if state.is_world_process_zero:
            self.first_progress = begin = self.schedule.progress(state.global_step) if state.global_step else 0.0
            settings, created = self.run.description["options"], self.run.description["created"]
            identity = f"{self.run.folder.resolve()} {created}"
            self.trackers = Trackers(self.track, self.run.folder, settings, identity=identity, step=state.global_step)
            self.bar = tqdm(total=1.0, initial=begin, bar_format=BAR, dynamic_ncols=True, disable=None, leave=False)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.step_started = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add the step's time; validation and saving do not count towards the speed."""
        self.step_seconds += time.perf_counter() - self.step_started
        if self.bar is not None:
            self.bar.set_postfix_str(summary(self.last | {"step": state.global_step}), refresh=False)
            self.bar.update(self.schedule.progress(state.global_step) - self.bar.n)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is None:
            return
        step, logs = state.global_step, kwargs["logs"]
        record = {"step": step, "tokens": step * self.tokens_per_step, "seconds": round(self.schedule.seconds, 3)}
        if "loss" in logs:
            self._write(record := record | self._training(step, logs))
            if self.bar.disable:
                tqdm.write(f"{summary(record)}, {self._time_left(step)} left", file=sys.stderr)
        elif "eval_loss" in logs:
            self._write(record | self._bits(logs["eval_loss"], "validation"))
            tqdm.write(summary(self.last), file=sys.stderr)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.trackers is not None:
            self.trackers.close()

    def _training(self, step: int, logs: dict[str, float]) -> dict[str, Any]:
        steps, seconds, norm = step - self.last_step, self.step_seconds, logs.get("grad_norm")
        self.last_step, self.step_seconds = step, 0.0
        return self._bits(logs["loss"], "training") | {
            "learning_rate": logs["learning_rate"],
            # JSON has no infinity
            "gradient_norm": norm if norm is not None and math.isfinite(norm) else None,
            "tokens_per_second": round(steps * self.tokens_per_step / seconds),
        }

    def _bits(self, nats: float, part: str) -> dict[str, float]:
        bits = nats / math.log(2)
        return {f"{part}_bits_per_token": bits, f"{part}_bits_per_byte": bits * self.tokens_per_byte[part]}

    def _write(self, record: dict[str, Any]) -> None:
        self.last |= record
        with open(self.run.log, "a") as stream:
            stream.write(json.dumps(record) + "\n")
        if self.trackers is not None:
            self.trackers.log(record, record["step"])

    def _time_left(self, step: int) -> str:
        progress = self.schedule.progress(step)
        elapsed, done = self.schedule.seconds - self.schedule.before, progress - self.first_progress
        # a run that is resumed after its time has made no progress
        return tqdm.format_interval(elapsed * (1 - progress) / done if progress < 1 else 0)


def summary(record: dict[str, Any]) -> str:
    """Format the figures that the record has as one line."""
    return ", ".join(text.format(record[name]) for name, text in SUMMARY.items() if name in record)


def draw_curve(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Plot bits per byte against the tokens seen."""
    records = list(records)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for part, style in CURVES.items():
        points = [(record["tokens"], record[name]) for record in records if (name := f"{part}_bits_per_byte") in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=part, **style)
    axes.set(xlabel="tokens", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png", dpi=130)
