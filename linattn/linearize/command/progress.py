"""The progress of a stage: a bar with the time left, or lines if there is no terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

from linattn.linearize.training import Progress

BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}{postfix}"
LINE_SECONDS = 10.0
"""The time from one line to the next."""


@contextmanager
def progress_bar(
    stage: str, tokens: int, log: Callable[[dict[str, float], int], None]
) -> Iterator[Callable[[Progress], None]]:
    """Yield the function that shows the progress after each step, of so many `tokens`, with a line for each validation,
    and passes the figures on to `log` with the number of the step."""
    started, last_line, first = time.monotonic(), 0.0, 0

    def show(progress: Progress) -> None:
        nonlocal last_line, first
        left, elapsed = tqdm.format_interval(progress.seconds_left), time.monotonic() - started
        # a stage that goes on begins with a later step
        first = first or progress.step
        speed = round((progress.step - first + 1) * tokens / elapsed)
        text = f"step {progress.step:,}, loss {progress.loss:.4f}, {speed:,} tokens/s, {left} left"
        held_out = {f"{stage}_held_out_{name}": x for name, x in progress.figures.items()}
        log({f"{stage}_loss": progress.loss, "tokens_per_second": speed, **held_out}, progress.step)
        if held_out:
            figures = ", ".join(f"{name} {x:.4f}" for name, x in progress.figures.items())
            tqdm.write(f"{stage}: step {progress.step:,}, on held-out text: {figures}", file=sys.stderr)
        bar.set_postfix_str(text, refresh=False)
        bar.update(elapsed / (elapsed + progress.seconds_left) - bar.n)
        if bar.disable and (time.monotonic() - last_line > LINE_SECONDS or progress.step == progress.steps):
            last_line = time.monotonic()
            print(f"{stage}: {text}", file=sys.stderr)

    with tqdm(total=1.0, desc=stage, bar_format=BAR, dynamic_ncols=True, disable=None, leave=False) as bar:
        yield show
