"""The reports of a run in training: lines of JSON for plots, and a progress bar, or lines if there is no terminal."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from linattn.cli.schedule import Schedule


class Reports(TrainerCallback):
    """Reports from the first process only. Losses are in nats per token; bits per byte allow comparing tokenizers."""

    def __init__(
        self, log: Path, schedule: Schedule, *, tokens_per_byte: dict[str, float], tokens_per_step: int
    ) -> None:
        self.log, self.schedule = log, schedule
        self.tokens_per_byte, self.tokens_per_step = tokens_per_byte, tokens_per_step
        self.step_seconds, self.last_step, self.step_started, self.first_progress = 0.0, 0, 0.0, 0.0
        self.last: dict[str, Any] = {}
        self.bar: tqdm | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.last_step = state.global_step
        if state.is_world_process_zero:
            # the bar counts progress from 0 to 1, which also gives a remaining time where --minutes ends the run
            layout = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
            self.first_progress = self.schedule.progress(state.global_step) if state.global_step else 0.0
            self.bar = tqdm(
                total=1.0, initial=self.first_progress, bar_format=layout, dynamic_ncols=True, disable=None, leave=False
            )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.step_started = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add the step's time; validation and saving do not count towards the speed."""
        self.step_seconds += time.perf_counter() - self.step_started
        if self.bar is not None:
            self.bar.set_postfix_str(summary(self.last | {"step": state.global_step}), refresh=False)
            self.bar.update(self.schedule.progress(state.global_step) - self.bar.n)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        step, logs = state.global_step, kwargs["logs"]
        record = {"step": step, "tokens": step * self.tokens_per_step, "seconds": round(self.schedule.seconds, 3)}
        if "loss" in logs:
            self._write(record := record | self._training(state, logs))
            if self.bar is not None and self.bar.disable:
                self._say(f"{summary(record)}, {self._time_left(step)} left")
        elif "eval_loss" in logs:
            self._write(record | self._bits(logs["eval_loss"], "validation"))
            self._say(summary(self.last))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _time_left(self, step: int) -> str:
        progress = self.schedule.progress(step)
        elapsed = self.schedule.seconds - self.schedule.before
        return tqdm.format_interval(elapsed * (1 - progress) / (progress - self.first_progress))

    def _training(self, state: TrainerState, logs: dict[str, float]) -> dict[str, float]:
        steps, seconds = state.global_step - self.last_step, self.step_seconds
        self.last_step, self.step_seconds = state.global_step, 0.0
        norm = logs.get("grad_norm")
        # JSON has no infinity
        finite = norm if norm is not None and math.isfinite(norm) else None
        rates = {"learning_rate": logs["learning_rate"], "gradient_norm": finite}
        speed = {"tokens_per_second": round(steps * self.tokens_per_step / seconds)}
        return self._bits(logs["loss"], "training") | rates | speed

    def _bits(self, nats: float, part: str) -> dict[str, float]:
        bits = nats / math.log(2)
        return {f"{part}_bits_per_token": bits, f"{part}_bits_per_byte": bits * self.tokens_per_byte[part]}

    def _write(self, record: dict[str, Any]) -> None:
        self.last |= record
        with open(self.log, "a") as stream:
            stream.write(json.dumps(record) + "\n")

    def _say(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)


def summary(record: dict[str, Any]) -> str:
    """Format the figures that the record has as one line."""
    texts = {
        "step": "step {:,}",
        "training_bits_per_byte": "training {:.3f} bits/byte",
        "validation_bits_per_byte": "validation {:.3f} bits/byte",
        "tokens_per_second": "{:,} tokens/s",
    }
    return ", ".join(text.format(record[name]) for name, text in texts.items() if name in record)
