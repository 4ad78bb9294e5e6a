"""Compares two runs: ratios of medians that are beyond both runs' spread."""

from typing import NamedTuple

from linattn.cli.bench.record import ERROR, SECONDS, Measurement, Record
from linattn.cli.bench.report import VIEWS, aligned

# smaller changes are not told, however sure: the next run's machine differs by more
LEAST = 0.05
CONDITIONS = ("processor", "gpu", "threads", "torch", "instructions", "device")


class Change(NamedTuple):
    before: Measurement
    after: Measurement

    @property
    def ratio(self) -> float:
        return self.after.point.value / self.before.point.value if self.before.point.value else float("inf")

    @property
    def is_real(self) -> bool:
        """Tell whether the spreads do not meet and the medians differ by more than LEAST."""
        before, after = self.before.point, self.after.point
        apart = after.low > before.high or after.high < before.low
        return apart and not 1 - LEAST < self.ratio < 1 + LEAST

    @property
    def verdict(self) -> str:
        return (("slower", "faster") if self.before.quantity == SECONDS else ("more", "less"))[self.ratio < 1]

    def row(self) -> list[str]:
        quantity, workload, method, dtype, n = self.before.key
        medians = [VIEWS[quantity].shown(each.point.value) for each in self]
        ratio = f"{self.ratio:.3g}" + ("" if quantity == ERROR else "×")
        return [f"{quantity} of {workload}, {dtype}: {method}", f"{n:,}", *medians, ratio, self.verdict]


def changes(before: Record, after: Record) -> list[Change]:
    found = {each.key: each for each in after.measurements}
    return [Change(each, found[each.key]) for each in before.measurements if each.key in found]


def compared(before: Record, after: Record) -> str:
    """Tell the figures that changed, worst first, after the conditions that differ."""
    every = changes(before, after)
    real = sorted((change for change in every if change.is_real), key=lambda change: -change.ratio)
    parts = [f"A: {before.machine_line}\nB: {after.machine_line}"]
    a, b = (each.options | {name: each.machine.get(name) for name in CONDITIONS} for each in (before, after))
    if different := [f"{name}: {a[name]} in A, {b.get(name)} in B" for name in a if a[name] != b.get(name)]:
        parts.append("\n".join(["not the same conditions", *different]))
    if real:
        parts.append(aligned([["", "n", "A", "B", "B / A", ""], *(change.row() for change in real)]))
    parts.append(
        f"{len(real)} of {len(every)} figures changed beyond the spread (fastest run to upper quartile) and by more "
        f"than {100 * LEAST:.0f} %; the others did not."
    )
    for name, record in (("A", before), ("B", after)):
        if missing := len(record.measurements) - len(every):
            parts.append(f"{missing} figures are in {name} only.")
    return "\n\n".join(parts)
