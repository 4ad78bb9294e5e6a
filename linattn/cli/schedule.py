"""The schedule of a run: its end, its learning rate, and how Ctrl-C ends it early."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from linattn.console.learning_rate import learning_rate_factor

ECHO_SECONDS = 1.0
"""After so many seconds another Ctrl-C is the user's: launchers repeat the signal that all processes had already."""

WARMUP_STEPS, WARMUP_SHARES = 100, (0.05, 0.3)
"""The default number of steps in the warm-up, and the least and the largest share of a run that it may be. After a
shorter one, a model with tied embeddings predicts the frequencies of tokens for long (docs/learning.md)."""


class Schedule(TrainerCallback, ExportableState):
    """Counts the seconds of training without interruptions. The learning rate follows the share of the time or of the
    steps that has passed, whichever is larger."""

    def __init__(self, *, steps: int, minutes: float | None, warmup: float | None) -> None:
        self.steps, self.warmup = steps, warmup
        self.limit = math.inf if minutes is None else 60 * minutes
        self.seconds = self.before = 0.0
        self.started = time.monotonic()
        self.stepping = self.interrupted = self.must_stop = False

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seconds": self.seconds}}

    def progress(self, step: int) -> float:
        """Return the progress from 0 to 1 in the middle of a step, so that no step has a learning rate of zero."""
        return min(1.0, max((step + 0.5) / self.steps, self.seconds / self.limit))

    def warmup_share(self, step: int) -> float:
        """Return the share of the run in which the learning rate rises: --warmup, else `WARMUP_STEPS` as a share of all
        steps, between the limits `WARMUP_SHARES`. If the time ends the run, the number of all steps is estimated from
        the progress so far."""
        if self.warmup is not None:
            return self.warmup
        least, most = WARMUP_SHARES
        return min(most, max(least, WARMUP_STEPS * self.progress(step) / (step + 0.5)))

    def learning_rate_factor(self, step: int) -> float:
        return learning_rate_factor(self.progress(step), self.warmup_share(step))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        callbacks: Any = state.stateful_callbacks
        saved = callbacks[type(self).__name__]
        self.before = self.seconds = saved["attributes"]["seconds"]
        self.started = time.monotonic()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.stepping = True

    def on_optimizer_step(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Set the same time in all processes before the scheduler's step: if one stopped alone, others would wait."""
        self.seconds, interrupted = largest(
            self.before + time.monotonic() - self.started, float(self.interrupted), device=args.device
        )
        self.must_stop = interrupted > 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.must_stop:
            control.should_log = control.should_save = control.should_training_stop = True
        elif self.seconds >= self.limit:
            control.should_log = control.should_evaluate = control.should_save = control.should_training_stop = True

    @contextmanager
    def saves_on_interrupt(self) -> Iterator[None]:
        """Let the step end and be saved after Ctrl-C or a request to terminate. A second Ctrl-C does not wait, and
        before the first step there is nothing to save."""
        asked_at = math.inf

        def ask(number: int, frame: FrameType | None) -> None:
            nonlocal asked_at
            again = number == signal.SIGINT and time.monotonic() > asked_at + ECHO_SECONDS
            if again or not self.stepping:
                raise KeyboardInterrupt
            asked_at = min(asked_at, time.monotonic())
            self.interrupted = True

        with ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM):
                stack.callback(signal.signal, number, signal.signal(number, ask))
            yield


def largest(*values: float, device: torch.device) -> list[float]:
    """Return the maximum of each value over the processes."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return list(values)
    shared = torch.tensor(values, dtype=torch.float32, device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return shared.tolist()
