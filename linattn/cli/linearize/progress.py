"""The progress of a stage: a bar with the time left, or lines if there is no terminal."""

import sys
import time
from types import TracebackType

from tqdm.auto import tqdm

from linattn.integrations.transformers.linearize import Progress

BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}"
LINE_SECONDS = 10.0
"""The time from one line to the next."""


class Bar:
    def __init__(self, stage: str) -> None:
        self.stage, self.started, self.said = stage, time.monotonic(), 0.0
        self.bar = tqdm(total=1.0, desc=stage, bar_format=BAR, dynamic_ncols=True, disable=None, leave=False)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.close()

    def show(self, progress: Progress) -> None:
        """Show a step that is done."""
        left = tqdm.format_interval(progress.seconds_left)
        text = f"step {progress.step:,}, loss {progress.loss:.4f}, {left} left"
        elapsed = time.monotonic() - self.started
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(elapsed / (elapsed + progress.seconds_left) - self.bar.n)
        if self.bar.disable and (time.monotonic() - self.said > LINE_SECONDS or progress.step == progress.steps):
            self.said = time.monotonic()
            print(f"{self.stage}: {text}", file=sys.stderr)
