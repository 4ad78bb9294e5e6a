"""Measure time with methods in turns, peak memory in a process of its own, and groups of cases within a budget."""

import math
import multiprocessing
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
from torch.utils.benchmark import Timer, timer
from tqdm.auto import tqdm

from linattn.cli.bench import DECODING, SOFTMAX
from linattn.cli.bench.record import BYTES, SECONDS, Case, Measurement, Record, Setup
from linattn.console.errors import one_line
from linattn.console.machine import forget_peak, machine_facts, peak_bytes
from linattn.states.rows import num_bytes

Name = TypeVar("Name", bound=Hashable)
Call = Callable[[], object]
# seconds of a measurement: shorter calls are repeated
SPAN = 0.01
# seconds that it takes to start a process and to make the inputs
OVERHEAD = 0.3
# the largest part of the remaining time for one group, and of the machine's memory for one case
TIME_SHARE, MEMORY_SHARE = 0.5, 0.6


class Workload(NamedTuple):
    """A call whose inputs exist already, and the state from which it starts, if there is one."""

    call: Call
    state: object = None


Prepare = Callable[[Setup, Case], Workload]
"""Makes the workload of a case. It must be a function of a module, so that other processes can import it."""


class Cost(NamedTuple):
    bytes: float
    seconds: float


def interleaved_times(
    calls: Mapping[Name, Call], repeats: int, *, deadline: float = math.inf, warm: float = 0.0
) -> dict[Name, list[float]]:
    """Time every call `repeats` times, or fewer when the deadline (of `time.monotonic`) passes.

    The calls take turns, so that a slow moment of the machine slows all of them. Each is called untimed right before it
    is timed, once or for `warm` seconds, because a virtual machine's host takes back memory that is not in use."""
    threads, times = torch.get_num_threads(), {name: list[float]() for name in calls}
    for round_ in range(repeats):
        for name, call in calls.items():
            if round_ and time.monotonic() > deadline:
                return times
            start = time.monotonic()
            while time.monotonic() - start < warm:
                call()
            timed = Timer("call()", globals={"call": call}, num_threads=threads)
            # torch's timer waits for the GPU, and its first calls are untimed and decide the number of repetitions
            times[name].append(timed.blocked_autorange(min_run_time=SPAN).mean)
    return times


def call_cost(prepare: Prepare, setup: Setup, case: Case, patience: float | None = None) -> Cost:
    """Measure the memory and the duration of one call. Raise RuntimeError if it takes more than `patience` seconds.

    The memory is the size of the state from which the call starts, or for a call without a state its peak above the
    inputs. On a CPU each call runs in a process of its own, because a process may keep the memory of earlier calls.
    These processes are forked from one that has only imported torch, if the system can do that."""
    if setup.device == "cuda":
        return _cost_here(prepare, setup, case)
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (setup.threads,)) as pool:
        try:
            return pool.submit(_cost_here, prepare, setup, case).result(patience)
        except TimeoutError as error:
            raise RuntimeError("no time was left") from error
        finally:
            # the pool would wait for the call and for the end of the process
            for process in multiprocessing.active_children():
                process.kill()


def _cost_here(prepare: Prepare, setup: Setup, case: Case) -> Cost:
    cuda = torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated
    reset, highest = cuda if setup.device == "cuda" else (forget_peak, peak_bytes)
    # the first call loads libraries, which are no part of the workload: a short sequence goes first
    prepare(setup, replace(case, n=min(case.n, 64))).call()
    workload = prepare(setup, case)
    reset()
    before, start = highest(), timer()
    results = workload.call()
    seconds, peak = timer() - start, float(highest() - before)
    del results
    return Cost(peak if workload.state is None else float(num_bytes(workload.state)), seconds)


def measure(prepare: Prepare, groups: Sequence[list[Case]], options: Mapping[str, Any]) -> Record:
    """Measure groups of cases, which the caller sorts by length; `prepare` makes their workloads. The record keeps
    `options`, those of `linattn bench`."""
    setup = Setup(**{name: options[name] for name in Setup.__annotations__})
    started, machine = time.monotonic(), machine_facts(setup.device, setup.threads)
    torch.set_num_threads(setup.threads)
    benchmark = Benchmark(prepare, setup, options["repeats"], started + options["budget"])
    for group in tqdm(groups, dynamic_ncols=True, disable=None, leave=False, unit="group"):
        benchmark.measure(group)
    command, seconds = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), round(time.monotonic() - started, 1)
    return Record(command, machine, dict(options), tuple(benchmark.measurements), dict(benchmark.dropped), seconds)


class Benchmark:
    """Measures groups of cases, short sequences first. A method ends at the first case that fails, or for which the
    time or the memory is too small."""

    def __init__(self, prepare: Prepare, setup: Setup, repeats: int, deadline: float) -> None:
        self.prepare, self.setup, self.repeats, self.deadline = prepare, setup, repeats, deadline
        self.measurements: list[Measurement] = []
        self.dropped: dict[str, list[str]] = defaultdict(list)
        self.ended = set[tuple[str, str, str]]()
        self.last = dict[tuple[str, str, str], tuple[int, Cost]]()
        """The last length of each curve and its cost, from which those of longer sequences are predicted."""

    def measure(self, group: Sequence[Case]) -> None:
        """Measure the memory of the cases, the fastest method first, then the time of all cases in turns."""
        left, calls = TIME_SHARE * (self.deadline - time.monotonic()), dict[Case, Call]()
        cases = [case for case in group if case.curve not in self.ended]
        for case in sorted(cases, key=lambda case: self._predicted(case).seconds):
            try:
                self._seconds_within(left, case)
                cost = call_cost(self.prepare, self.setup, case, max(1.0, self.deadline - time.monotonic()))
                self.measurements.append(Measurement(*case.curve, case.n, BYTES, (cost.bytes,)))
                self.last[case.curve] = case.n, cost
                left -= self._seconds_within(left, case)
                calls[case] = self.prepare(self.setup, case).call
            # other packages may fail in any way, and the figures of the others are still of use
            except Exception as error:
                reason = f"{case.workload}, {case.dtype}, from n = {case.n:,} on, {one_line(error)[:200]}"
                self.dropped[reason].append(case.method)
                self.ended.add(case.curve)
        for case, values in interleaved_times(calls, self.repeats, deadline=self.deadline).items():
            self.measurements.append(Measurement(*case.curve, case.n, SECONDS, tuple(values)))
            self.last[case.curve] = case.n, self._predicted(case)._replace(seconds=statistics.median(values))

    def _predicted(self, case: Case) -> Cost:
        n, cost = self.last.get(case.curve, (case.n, Cost(0.0, 0.01)))
        # the greatest power of n with which the time may grow
        power = (SOFTMAX in case.method) + (not case.workload.endswith(DECODING))
        return Cost(cost.bytes * case.n / n, cost.seconds * (case.n / n) ** power)

    def _seconds_within(self, left: float, case: Case) -> float:
        """Predict the seconds that the case takes. Raise RuntimeError if that is more than `left`, or if the memory is
        too small."""
        size, call = self._predicted(case)
        on_gpu = self.setup.device == "cuda"
        if size > MEMORY_SHARE * (torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total):
            raise RuntimeError(f"it would need more than {MEMORY_SHARE:.0%} of the memory")
        # two calls for the memory, and two per round
        if (seconds := OVERHEAD + 2 * (1 + self.repeats) * call) > left:
            raise RuntimeError("no time was left")
        return seconds
