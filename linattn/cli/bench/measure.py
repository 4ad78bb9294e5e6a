"""Measures cases from short to long within a time budget: memory in a process for each, then time in turns."""

import ctypes
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
import torch
from torch.utils.benchmark import Timer, timer

from linattn.cli.bench import MODEL_DECODING, MODEL_WORKLOADS, ONE_TOKEN, RATE, SOFTMAX
from linattn.cli.bench.peers import PEERS
from linattn.cli.bench.record import BYTES, SECONDS, STATE_BYTES, Case, Curve, Dropped, Measurement, Setup
from linattn.cli.bench.workloads import MODEL_METHODS, POSITIONS, Call, batched_products, prepare
from linattn.cli.errors import one_line
from linattn.ops.nested import num_bytes

Name = TypeVar("Name", bound=Hashable)
# timing lasts at least so many seconds: short calls are repeated
SPAN = 0.01
# seconds that it takes to begin a process and to make the inputs
OVERHEAD = 0.3
# a group is not given more of the time that is left, nor a case more of the machine's memory
TIME_SHARE, MEMORY_SHARE = 0.5, 0.6


def plan(
    workloads: Sequence[str], methods: Sequence[str], dtypes: Sequence[str], lengths: Sequence[int]
) -> list[list[Case]]:
    """Return groups of cases that take turns, short sequences first. Peers have no form for one token at a time."""
    groups = []
    for n, workload, dtype in product(sorted({*lengths, *POSITIONS}), workloads, dtypes):
        names = MODEL_METHODS if workload in MODEL_WORKLOADS else methods
        group = [Case(workload, name, dtype, n) for name in names if name not in PEERS or workload not in ONE_TOKEN]
        if group and (n in lengths or workload == MODEL_DECODING):
            groups.append(group)
    return groups


class Found(NamedTuple):
    bytes: float
    seconds: float
    """Duration of one call, cold."""


class Measuring:
    """Measures groups of cases, short sequences first, until they fail or no longer fit into the limits."""

    def __init__(self, setup: Setup, repeats: int, deadline: float) -> None:
        self.setup, self.repeats, self.deadline = setup, repeats, deadline
        self.measurements: list[Measurement] = []
        self.dropped: list[Dropped] = []
        self.ended: dict[Curve, str] = {}
        self.last: dict[Curve, tuple[int, Found]] = {}
        """The last length and its figures, from which those of longer sequences are predicted."""

    def measure(self, group: list[Case]) -> None:
        cases = [case for case in self._within_limits(group) if self._measure_memory(case)]
        # the time of a call is known now
        if cases := self._within_limits(cases):
            self._measure_time(cases)

    def _within_limits(self, cases: list[Case]) -> list[Case]:
        """Drop what is too large. The fastest methods of the group come first; a curve that has ended stays so."""
        left = TIME_SHARE * (self.deadline - time.monotonic())
        on_gpu = self.setup.device == "cuda"
        memory = torch.cuda.get_device_properties("cuda").total_memory if on_gpu else psutil.virtual_memory().total
        for case in sorted(cases, key=lambda case: self._predicted(case).seconds):
            size, call = self._predicted(case)
            # two calls for the memory, and two per round
            seconds = OVERHEAD + 2 * (1 + self.repeats) * call
            if case.curve in self.ended:
                self._drop(case, self.ended[case.curve])
            elif size > MEMORY_SHARE * memory:
                self._drop(case, f"it would need about {size / 2**30:,.0f} GiB of memory")
            elif seconds > left:
                self._drop(case, f"no time was left: {seconds:,.1f} s")
            else:
                left -= seconds
        return [case for case in cases if case.curve not in self.ended]

    def _predicted(self, case: Case) -> Found:
        n, found = self.last.get(case.curve, (case.n, Found(0.0, 0.01)))
        longer = max(1.0, case.n / n)
        # the greatest power of n with which the time may grow
        power = (SOFTMAX in case.method) + (case.workload not in ONE_TOKEN)
        return Found(found.bytes * longer, found.seconds * longer**power)

    def _measure_memory(self, case: Case) -> bool:
        """Measure the size of the state where there is one, else the peak. Return whether the case could be run."""
        quantity, measure = (STATE_BYTES, state_size) if case.workload in ONE_TOKEN else (BYTES, peak_memory)
        try:
            found = measure(self.setup, case, max(1.0, self.deadline - time.monotonic()))
        # another package may fail in any way; the rest of the run is still worth having
        except Exception as error:
            self._drop(case, one_line(error)[:200])
            return False
        self.last[case.curve] = case.n, found
        self.measurements.append(Measurement(*case.curve, case.n, quantity, (found.bytes,)))
        return True

    def _measure_time(self, cases: list[Case]) -> None:
        workloads = {case: prepare(self.setup, case) for case in cases}
        rate, products = replace(cases[0], method=RATE), batched_products(self.setup.device, cases[0].torch_dtype)
        if any(workload.flop for workload in workloads.values()):
            workloads[rate] = products
        calls = {case: workload.call for case, workload in workloads.items()}
        times = alternate(calls, self.repeats, deadline=self.deadline)
        for case, values in times.items():
            flop = workloads[case].flop
            limit = flop / products.flop * statistics.median(times[rate]) if flop else None
            self.measurements.append(Measurement(*case.curve, case.n, SECONDS, tuple(values), limit))
            self.last[case.curve] = case.n, self._predicted(case)._replace(seconds=statistics.median(values))

    def _drop(self, case: Case, reason: str) -> None:
        self.ended[case.curve] = reason
        self.dropped.append(Dropped(*case.curve, case.n, reason))


def alternate(
    calls: Mapping[Name, Call], repeats: int, *, deadline: float = math.inf, warm: float = 0.0
) -> dict[Name, list[float]]:
    """Time every method `repeats` times, or fewer when the deadline (of `time.monotonic`) passes. Methods take turns: a
    machine that is slow for a while is then slow for all of them.

    Each is called untimed right before it is timed, once or for `warm` seconds: a virtual machine's host takes back
    memory that stood free while the others ran."""
    threads, times = torch.get_num_threads(), {name: list[float]() for name in calls}
    for round_ in range(repeats):
        for name, call in calls.items():
            if round_ and time.monotonic() > deadline:
                return times
            start = time.monotonic()
            while time.monotonic() - start < warm:
                call()
            timed = Timer("call()", globals={"call": call}, num_threads=threads)
            # torch's timer waits for the GPU, and begins with untimed calls that say how often to repeat the call
            times[name].append(timed.blocked_autorange(min_run_time=SPAN).mean)
    return times


def state_size(setup: Setup, case: Case, patience: float) -> Found:
    workload, start = prepare(setup, case), timer()
    workload.call()
    return Found(num_bytes(workload.state), timer() - start)


def peak_memory(setup: Setup, case: Case, patience: float) -> Found:
    """Measure the peak of one call above its inputs: outputs, gradients, and all temporaries. Wait no longer than
    `patience` seconds for it.

    On a CPU each call runs in a process of its own, because a process may keep what it has taken. These are forked from
    one that has imported torch and nothing more, where the system can do that."""
    if torch.device(setup.device).type == "cuda":
        return _peak_here(setup, case, torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated)
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (setup.threads,)) as pool:
        try:
            return pool.submit(_peak_here, setup, case, _reset_resident, _resident_peak).result(patience)
        except TimeoutError as error:
            raise RuntimeError("no time was left for it") from error
        except BrokenProcessPool as error:
            raise RuntimeError("its process died, probably for want of memory") from error
        finally:
            # the pool would wait for the call, and for the process to tidy up
            for process in multiprocessing.active_children():
                process.kill()


def _peak_here(setup: Setup, case: Case, reset: Callable[[], None], highest: Callable[[], float]) -> Found:
    # the first call loads libraries, which are no part of the workload: a short sequence goes first
    prepare(setup, replace(case, n=min(case.n, 64))).call()
    call = prepare(setup, case).call
    reset()
    before, start = highest(), timer()
    kept = call()
    found = Found(highest() - before, timer() - start)
    del kept
    return found


def _reset_resident() -> None:
    """Let Linux forget the peak so far. Elsewhere an earlier one may hide the next."""
    forget = Path("/proc/self/clear_refs")
    if forget.exists():
        # free memory that the process keeps would hide what is taken next
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)
        forget.write_text("5")


def _resident_peak() -> float:
    if os.name == "nt":
        return float(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
