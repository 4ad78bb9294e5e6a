"""Seconds a call, of contenders that take turns: a slower machine for a while slows down all of them."""

import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from linattn.cli.bench.cells import Call

SPAN = 0.01
"""Seconds that are timed at once, at least: short calls are repeated."""
BLOCK = 64
Stopwatch = Callable[[Call, int], float]
Name = TypeVar("Name", bound=Hashable)


def on_cpu(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def on_cuda(call: Call, count: int) -> float:
    """By the device's own clock, between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / count


def stopwatch(device: str) -> Stopwatch:
    return on_cuda if torch.device(device).type == "cuda" else on_cpu


def alternate(
    calls: Mapping[Name, Call],
    repeats: int,
    timed: Stopwatch = on_cpu,
    deadline: float = math.inf,
    warm: float = 0.0,
) -> dict[Name, list[float]]:
    """Seconds a call of each contender, `repeats` times, or fewer when the deadline (of `time.monotonic`) passes.

    Each is called untimed right before it is timed, once or for `warm` seconds: a virtual machine's host takes back
    memory that stood free while the others ran."""
    counts = {name: max(1, math.ceil(SPAN / max(timed(call, 1), 1e-9))) for name, call in calls.items()}
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats):
        for name, call in calls.items():
            if round_ and time.monotonic() > deadline:
                return times
            start = time.monotonic()
            call()
            while time.monotonic() - start < warm:
                call()
            times[name].append(timed(call, counts[name]))
    return times


def products(device: str, dtype: torch.dtype) -> tuple[Call, float]:
    """Batched products of 64 × 64 × 64 blocks, and their FLOP: what chunked attention could do at best."""
    batch = 64 if torch.device(device).type == "cpu" else 16384
    a, b = (torch.randn(batch, BLOCK, BLOCK, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.bmm(a, b, out=out), batch * 2.0 * BLOCK**3
