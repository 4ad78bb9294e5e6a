"""Goes through the plan: each contender's memory and a first time in a process of its own, then all in turns."""

import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from linattn.cli.bench import memory
from linattn.cli.bench.cells import DECODING, MODEL_WORKS, Call, Cell, Setup
from linattn.cli.bench.plan import Costs
from linattn.cli.bench.record import BYTES, SECONDS, Dropped, Measurement
from linattn.cli.bench.timing import alternate, products, stopwatch
from linattn.cli.bench.works import prepare

RATE = "batched 64³ products"
LARGEST_SHARE = 0.6
"""Of the machine's memory: what is foretold to need more is not tried."""


class Measuring:
    def __init__(
        self, setup: Setup, groups: list[list[Cell]], *, repeats: int, seconds: float, say: Callable[[str], None]
    ) -> None:
        self.setup, self.groups, self.repeats, self.say = setup, groups, repeats, say
        self.deadline = time.monotonic() + seconds
        self.costs = Costs(repeats)
        self.measurements: list[Measurement] = []
        self.dropped: list[Dropped] = []
        self.ended: dict[tuple[str, str, str], str] = {}

    def run(self) -> Iterator[None]:
        """Yields after each group."""
        for number, group in enumerate(self.groups):
            self.say(f"{group[0].work}, {group[0].dtype}, n = {group[0].n:,}")
            self._measure(self._within_limits(group, self.groups[number + 1 :]))
            yield

    def _within_limits(self, group: list[Cell], later: list[list[Cell]]) -> list[Cell]:
        """A contender that is given up once is not tried with longer sequences: those that still run keep the time."""
        ahead = [cell for cells in (group, *later) for cell in cells if cell.curve not in self.ended]
        fitting = self.costs.fitting(ahead, self.deadline - time.monotonic())
        for cell in group:
            if cell.curve in self.ended:
                self._drop(cell, self.ended[cell.curve])
            elif (size := self.costs.memory(cell)) > LARGEST_SHARE * memory.total_memory(self.setup.device):
                self._drop(cell, f"it would need about {size / 2**30:.0f} GiB of memory")
            elif cell not in fitting:
                self._drop(cell, f"no time was left: {self.costs.of_cell(cell):,.1f} s")
        return [cell for cell in group if cell.curve not in self.ended]

    def _measure(self, cells: list[Cell]) -> None:
        for cell in cells:
            self._measure_memory(cell)
        # the time of a call is known now
        calls: dict[Cell, Call] = {}
        flop: dict[Cell, float | None] = {}
        for cell in cells:
            left = self.deadline - time.monotonic() - sum(map(self.costs.of_timing, calls))
            if cell.curve in self.ended:
                continue
            if self.costs.of_timing(cell) > left:
                self._drop(cell, f"no time was left: {self.costs.of_timing(cell):,.1f} s")
                continue
            work = prepare(self.setup, cell)
            calls[cell], flop[cell] = _with_grad(work.begin(), work.grad), work.flop
        if calls:
            self._measure_time(calls, flop)

    def _measure_memory(self, cell: Cell) -> None:
        begun = time.monotonic()
        try:
            found = memory.peak(self.setup, cell, max(1.0, self.deadline - time.monotonic()))
        # a contender of others may fail in any way; the rest of the run is still worth having
        except (memory.Failed, RuntimeError, ValueError, ImportError) as error:
            self._drop(cell, " ".join(str(error).split())[:200] or type(error).__name__)
            return
        self.costs.saw(cell, found.seconds, found.bytes)
        self.costs.saw_process(time.monotonic() - begun - 2 * found.seconds)
        if not math.isnan(found.bytes):
            self.measurements.append(Measurement(BYTES, cell.work, cell.method, cell.dtype, cell.n, (found.bytes,)))

    def _measure_time(self, calls: dict[Cell, Call], flop: dict[Cell, float | None]) -> None:
        first = next(iter(calls))
        named = {cell.method: call for cell, call in calls.items()}
        product_flop = None
        if first.work != DECODING and first.work not in MODEL_WORKS:
            named[RATE], product_flop = products(self.setup.device, first.torch_dtype)
        times = alternate(named, self.repeats, stopwatch(self.setup.device), self.deadline)
        per_flop = statistics.median(times[RATE]) / product_flop if product_flop else None
        for cell in calls:
            values, count = tuple(times[cell.method]), flop[cell]
            limit = None if count is None or per_flop is None else count * per_flop
            self.measurements.append(Measurement(SECONDS, *cell.curve, cell.n, values, limit))
            self.costs.saw(cell, statistics.median(values), self.costs.memory(cell))
            self.costs.spend(cell)
        if per_flop is not None:
            self.measurements.append(Measurement(SECONDS, first.work, RATE, first.dtype, first.n, tuple(times[RATE])))

    def _drop(self, cell: Cell, reason: str) -> None:
        self.ended[cell.curve] = reason
        self.dropped.append(Dropped(*cell.curve, cell.n, reason))


def _with_grad(call: Call, grad: bool) -> Call:
    def with_grad() -> object:
        with torch.set_grad_enabled(grad):
            return call()

    return with_grad
