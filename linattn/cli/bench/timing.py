"""Seconds per call of methods that take turns: a machine that is slow for a while is then slow for all of them."""

import math
import time
import timeit
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch.utils import benchmark

from linattn.cli.bench.cases import Call

# a measurement lasts at least so many seconds: short calls are repeated
SPAN = 0.01
BLOCK = 64
Name = TypeVar("Name", bound=Hashable)


def seconds_per_call(call: Call, count: int) -> float:
    """Return the mean of `count` calls. torch's timer waits for the GPU."""
    return timeit.timeit(call, number=count, timer=benchmark.timer) / count


def alternate(
    calls: Mapping[Name, Call],
    repeats: int,
    timed: Callable[[Call, int], float] = seconds_per_call,
    deadline: float = math.inf,
    warm: float = 0.0,
) -> dict[Name, list[float]]:
    """Time every method `repeats` times, in turns, or fewer times when the deadline (of `time.monotonic`) passes.

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
    """Return batched products of 64 × 64 × 64 blocks, the most that chunked attention can reach, and their FLOP."""
    batch = 64 if torch.device(device).type == "cpu" else 16384
    a, b = (torch.randn(batch, BLOCK, BLOCK, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.bmm(a, b, out=out), batch * 2.0 * BLOCK**3
