"""What is to be measured, and what of it fits the time: costs are foretold from shorter sequences, and every contender
gets the same time, so that it is the longest sequences of the slowest that are left out."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from linattn.cli.bench import models
from linattn.cli.bench.cells import DECODING, MODEL_DECODING, MODEL_WORKS, Cell
from linattn.cli.bench.peers import PEERS
from linattn.cli.bench.timing import SPAN

PROCESS = 0.3
"""Seconds that it takes to begin a process of its own and to make the inputs, before there has been one."""
UNKNOWN = 0.01
"""Seconds of a call before there has been one."""


def plan(
    works: Sequence[str], methods: Sequence[str], dtypes: Sequence[str], lengths: Sequence[int], *, causal: bool
) -> list[list[Cell]]:
    """Groups of contenders that take turns, short sequences first."""
    cells = [
        Cell(work, method, dtype, n)
        for work in works
        for n in _lengths(work, lengths)
        for dtype in dtypes
        for method in (models.METHODS if work in MODEL_WORKS else methods)
        if causal or work != DECODING
        if not (method in PEERS and work == DECODING)
    ]
    order = {work: place for place, work in enumerate(works)}
    cells.sort(key=lambda cell: (cell.n, order[cell.work], dtypes.index(cell.dtype)))
    return [list(group) for _, group in groupby(cells, key=lambda cell: (cell.n, cell.work, cell.dtype))]


def _lengths(work: str, lengths: Sequence[int]) -> list[int]:
    return sorted({*lengths, *(models.POSITIONS if work == MODEL_DECODING else ())})


class Costs:
    """What was seen of each contender's curve, and what follows for longer sequences."""

    def __init__(self, repeats: int) -> None:
        self.repeats, self.process = repeats, PROCESS
        self.seconds: dict[tuple[str, str, str], tuple[int, float]] = {}
        self.bytes: dict[tuple[str, str, str], tuple[int, float]] = {}
        self.spent: dict[tuple[str, str, str], float] = {}

    def saw(self, cell: Cell, seconds: float, size: float) -> None:
        self.seconds[cell.curve] = cell.n, seconds
        self.bytes[cell.curve] = cell.n, size

    def saw_process(self, seconds: float) -> None:
        """The first one imports torch, so no single one counts for much."""
        self.process += (max(0.0, seconds) - self.process) / 8

    def spend(self, cell: Cell) -> None:
        """After the cell was measured, so that its cost is known."""
        self.spent[cell.curve] = self.spent.get(cell.curve, 0.0) + self.of_cell(cell)

    def of_call(self, cell: Cell) -> float:
        n, seconds = self.seconds.get(cell.curve, (cell.n, UNKNOWN))
        return seconds * max(1.0, cell.n / n) ** cell.growth

    def of_process(self, cell: Cell) -> float:
        """Memory is measured by one call, after making the inputs, which takes a fraction of a call."""
        return self.process + 2 * self.of_call(cell)

    def of_timing(self, cell: Cell) -> float:
        """Two calls before the first round, and two a round, of which the timed one takes SPAN at least."""
        call = self.of_call(cell)
        return self.process / 4 + 2 * call + self.repeats * (call + max(call, SPAN))

    def of_cell(self, cell: Cell) -> float:
        return self.of_process(cell) + self.of_timing(cell)

    def memory(self, cell: Cell) -> float:
        n, size = self.bytes.get(cell.curve, (cell.n, 0.0))
        return size * max(1.0, cell.n / n)

    def fitting(self, cells: Iterable[Cell], seconds: float) -> set[Cell]:
        """Every curve gets the same time, counting what it has had, and goes as far as that lasts."""
        needs: dict[tuple[str, str, str], float] = dict(self.spent)
        until = {}
        for cell in sorted(cells, key=lambda cell: cell.n):
            until[cell] = needs[cell.curve] = needs.get(cell.curve, 0.0) + self.of_cell(cell)
        fitting, cut = set(), set()
        for cell in sorted(until, key=lambda cell: (until[cell], cell.n)):
            if self.of_cell(cell) > seconds or cell.curve in cut:
                cut.add(cell.curve)
            else:
                seconds -= self.of_cell(cell)
                fitting.add(cell)
        return fitting
