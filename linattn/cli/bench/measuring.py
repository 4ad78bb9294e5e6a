"""Measures cases from short to long within a time budget: memory in a process for each, then time in turns."""

import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import torch

from linattn.cli.bench import memory
from linattn.cli.bench.cases import MODEL_DECODING, MODEL_WORKLOADS, ONE_TOKEN, RATE, Case, Curve, Setup
from linattn.cli.bench.peers import PEERS
from linattn.cli.bench.record import BYTES, SECONDS, STATE_BYTES, Dropped, Measurement
from linattn.cli.bench.timing import SPAN, alternate, products
from linattn.cli.bench.workloads import MODEL_METHODS, POSITIONS, prepare
from linattn.cli.errors import one_line

# seconds that it takes to begin a process and to make the inputs; seconds of a call before there has been one
OVERHEAD, UNKNOWN = 0.3, 0.01
# what is predicted to need more of the machine's memory is not tried
LARGEST_SHARE = 0.6


def plan(
    workloads: Sequence[str], methods: Sequence[str], dtypes: Sequence[str], lengths: Sequence[int]
) -> list[list[Case]]:
    """Return groups of cases that take turns, short sequences first. Peers have no form for one token at a time."""
    groups = []
    positions = POSITIONS if MODEL_DECODING in workloads else ()
    for n, workload, dtype in product(sorted({*lengths, *positions}), workloads, dtypes):
        names = MODEL_METHODS if workload in MODEL_WORKLOADS else methods
        group = [Case(workload, name, dtype, n) for name in names if name not in PEERS or workload not in ONE_TOKEN]
        if group and (n in lengths or workload == MODEL_DECODING):
            groups.append(group)
    return groups


class Budget:
    """Gives every curve the same time: the slow ones end early, at their largest lengths."""

    def __init__(self, repeats: int) -> None:
        self.repeats, self.overhead = repeats, OVERHEAD
        self.seen: dict[Curve, tuple[int, float, float]] = {}
        """The last length, its seconds per call, and its bytes, from which those of longer sequences are predicted."""
        self.spent: dict[Curve, float] = {}

    def fitting(self, cases: Iterable[Case], seconds: float) -> set[Case]:
        """Return the cases that the time suffices for. Curves that have had less time go first."""
        spent, until, fitting, cut = dict(self.spent), {}, set(), set()
        for case in sorted(cases, key=lambda case: case.n):
            until[case] = spent[case.curve] = spent.get(case.curve, 0.0) + self.cost(case)
        for case in sorted(until, key=lambda case: (until[case], case.n)):
            if case.curve not in cut and self.cost(case) <= seconds:
                seconds -= self.cost(case)
                fitting.add(case)
            else:
                cut.add(case.curve)
        return fitting

    def cost(self, case: Case) -> float:
        """Predict the seconds of a case: two calls for its memory, two before the first round, and two per round."""
        n, seconds, _ = self.seen.get(case.curve, (case.n, UNKNOWN, 0.0))
        call = seconds * max(1.0, case.n / n) ** case.growth
        return self.overhead + 4 * call + self.repeats * (call + max(call, SPAN))

    def size(self, case: Case) -> float:
        n, _, size = self.seen.get(case.curve, (case.n, 0.0, 0.0))
        return size * max(1.0, case.n / n)


class Measuring:
    def __init__(self, setup: Setup, groups: list[list[Case]], repeats: int, deadline: float) -> None:
        self.setup, self.groups, self.deadline, self.budget = setup, groups, deadline, Budget(repeats)
        self.measurements: list[Measurement] = []
        self.dropped: list[Dropped] = []
        self.ended: dict[Curve, str] = {}

    def measure(self, place: int) -> None:
        """Measure the group at this place, once those before it are done."""
        later = [case for group in self.groups[place + 1 :] for case in group]
        cases = [case for case in self._within_limits(self.groups[place], later) if self._measure_memory(case)]
        # the time of a call is known now
        if cases := self._within_limits(cases, later):
            self._measure_time(cases)

    def _within_limits(self, cases: list[Case], later: list[Case]) -> list[Case]:
        """Drop what is too large. A curve that has ended is not tried again, and the others get its time."""
        ahead = [case for case in (*cases, *later) if case.curve not in self.ended]
        fitting = self.budget.fitting(ahead, self.deadline - time.monotonic())
        for case in cases:
            size = self.budget.size(case)
            if case.curve in self.ended:
                self._drop(case, self.ended[case.curve])
            elif size > LARGEST_SHARE * _total_memory(self.setup.device):
                self._drop(case, f"it would need about {size / 2**30:,.0f} GiB of memory")
            elif case not in fitting:
                self._drop(case, f"no time was left: {self.budget.cost(case):,.1f} s")
        return [case for case in cases if case.curve not in self.ended]

    def _measure_memory(self, case: Case) -> bool:
        """Measure the size of the state where there is one, else the peak. Return whether the case could be run."""
        quantity, measure = (STATE_BYTES, memory.state) if case.workload in ONE_TOKEN else (BYTES, memory.peak)
        start = time.monotonic()
        try:
            found = measure(self.setup, case, max(1.0, self.deadline - time.monotonic()))
        # another package may fail in any way; the rest of the run is still worth having
        except Exception as error:
            self._drop(case, one_line(error)[:200])
            return False
        self.budget.seen[case.curve] = case.n, found.seconds, found.bytes
        # the first process imports torch, so no single one counts for much
        overhead = max(0.0, time.monotonic() - start - 2 * found.seconds)
        self.budget.overhead += (overhead - self.budget.overhead) / 8
        if not math.isnan(found.bytes):
            self.measurements.append(Measurement(quantity, *case.curve, case.n, (found.bytes,)))
        return True

    def _measure_time(self, cases: list[Case]) -> None:
        workloads = {case: prepare(self.setup, case) for case in cases}
        calls, rate, flop = {case: workload.call for case, workload in workloads.items()}, None, math.nan
        if any(workload.flop for workload in workloads.values()):
            rate = replace(cases[0], method=RATE)
            calls[rate], flop = products(self.setup.device, rate.torch_dtype)
        times = alternate(calls, self.budget.repeats, deadline=self.deadline)
        for case, values in times.items():
            needed = workloads[case].flop if case in workloads else None
            limit = needed * statistics.median(times[rate]) / flop if needed and rate else None
            measured = Measurement(SECONDS, *case.curve, case.n, tuple(values), limit)
            self.measurements.append(measured)
            self.budget.seen[case.curve] = case.n, measured.median, self.budget.size(case)
            self.budget.spent[case.curve] = self.budget.spent.get(case.curve, 0.0) + self.budget.cost(case)

    def _drop(self, case: Case, reason: str) -> None:
        self.ended[case.curve] = reason
        self.dropped.append(Dropped(*case.curve, case.n, reason))


def _total_memory(device: str) -> float:
    if device == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
