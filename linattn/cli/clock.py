"""When a run ends, how far it is, and what Ctrl-C means to it."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

INSISTS = 1.0
"""Seconds after which a second Ctrl-C is no echo of the first: launchers repeat signals that everybody had already."""


class Clock(TrainerCallback, ExportableState):
    """Counts the seconds of training, interruptions left out; the learning rate follows them, or the steps."""

    def __init__(self, *, steps: int, limit: float | None, warmup: float) -> None:
        self.steps, self.limit, self.warmup = steps, limit, warmup
        self.seconds = self.before = 0.0
        self.started = time.monotonic()
        self.interrupted = self.must_stop = False

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seconds": self.seconds}}

    def progress(self, step: int) -> float:
        """From 0 to 1. A step counts from its middle, so that neither the first nor the last has a rate of zero."""
        by_steps = (step + 0.5) / self.steps
        return min(1.0, by_steps if self.limit is None else max(by_steps, self.seconds / self.limit))

    def learning_rate_factor(self, step: int) -> float:
        """Rises in a line, then falls along half a cosine."""
        progress = self.progress(step)
        if progress < self.warmup:
            return progress / self.warmup
        return (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup))) / 2

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        callbacks: Any = state.stateful_callbacks
        saved = callbacks[type(self).__name__]
        self.before = self.seconds = saved["attributes"]["seconds"]
        self.started = time.monotonic()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Before the scheduler's step. Processes must agree: one that stopped alone would leave the others waiting."""
        self.seconds, interrupted = largest(
            self.before + time.monotonic() - self.started, float(self.interrupted), device=args.device
        )
        self.must_stop = interrupted > 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.must_stop:
            control.should_log = control.should_save = control.should_training_stop = True
        elif self.limit is not None and self.seconds >= self.limit:
            control.should_log = control.should_evaluate = control.should_save = control.should_training_stop = True

    @contextmanager
    def minds_interrupts(self) -> Iterator[None]:
        """In here Ctrl-C, or a request to terminate, lets the step end and be saved; a second Ctrl-C does not wait."""
        asked_at = math.inf

        def ask(number: int, frame: FrameType | None) -> None:
            nonlocal asked_at
            if number == signal.SIGINT and time.monotonic() > asked_at + INSISTS:
                raise KeyboardInterrupt
            asked_at = min(asked_at, time.monotonic())
            self.interrupted = True

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def largest(*values: float, device: torch.device) -> list[float]:
    """Each value's maximum over the processes."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return list(values)
    shared = torch.tensor(values, dtype=torch.float32, device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return shared.tolist()
