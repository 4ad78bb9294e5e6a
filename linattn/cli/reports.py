"""What a run tells while it trains: lines of JSON for plots, and a progress bar, or lines where no terminal is."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from linattn.cli.clock import Clock


class Reports(TrainerCallback):
    """Only the first process reports. Losses come in nats a token; bits a byte do not depend on what a token is."""

    def __init__(self, log: Path, clock: Clock, *, tokens_per_byte: dict[str, float], tokens_per_step: int) -> None:
        self.log, self.clock = log, clock
        self.tokens_per_byte, self.tokens_per_step = tokens_per_byte, tokens_per_step
        self.stepping, self.last_step, self.begun = 0.0, 0, 0.0
        self.first = 0.0
        """The progress that an earlier process made."""
        self.last: dict[str, Any] = {}
        self.bar: tqdm | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.last_step = state.global_step
        if state.is_world_process_zero:
            # it counts the progress from 0 to 1, which has a remaining time also where the clock ends the run
            layout = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
            self.first = self.clock.progress(state.global_step) if state.global_step else 0.0
            self.bar = tqdm(
                total=1.0, initial=self.first, bar_format=layout, dynamic_ncols=True, disable=None, leave=False
            )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Seconds of validation and saving are no part of the speed."""
        self.stepping += time.perf_counter() - self.begun
        if self.bar is not None:
            self.bar.set_postfix_str(summary(self.last | {"step": state.global_step}), refresh=False)
            self.bar.update(self.clock.progress(state.global_step) - self.bar.n)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        step, logs = state.global_step, kwargs["logs"]
        record = {"step": step, "tokens": step * self.tokens_per_step, "seconds": round(self.clock.seconds, 3)}
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
        progress = self.clock.progress(step)
        elapsed = self.clock.seconds - self.clock.before
        return tqdm.format_interval(elapsed * (1 - progress) / (progress - self.first))

    def _training(self, state: TrainerState, logs: dict[str, float]) -> dict[str, float]:
        steps, seconds = state.global_step - self.last_step, self.stepping
        self.last_step, self.stepping = state.global_step, 0.0
        norm = logs.get("grad_norm")
        # there is no infinity in JSON
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
    """The latest figures in a line: those there are."""
    texts = {
        "step": "step {:,}",
        "training_bits_per_byte": "training {:.3f} bits/byte",
        "validation_bits_per_byte": "validation {:.3f} bits/byte",
        "tokens_per_second": "{:,} tokens/s",
    }
    return ", ".join(text.format(record[name]) for name, text in texts.items() if name in record)
