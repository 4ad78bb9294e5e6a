"""What changed between two runs: the ratio of medians, and whether it is beyond both runs' spread."""

from typing import NamedTuple

from linattn.cli.bench.record import ERROR, SECONDS, Measurement, Record
from linattn.cli.bench.text import aligned, machine_line, shown

LEAST = 0.05
"""Smaller changes are not told, however sure: the next run's machine differs by more."""


class Change(NamedTuple):
    before: Measurement
    after: Measurement

    @property
    def ratio(self) -> float:
        return self.after.median / self.before.median if self.before.median else float("inf")

    @property
    def is_real(self) -> bool:
        """The spreads do not meet, and the medians differ by more than LEAST."""
        apart = self.after.low > self.before.high or self.after.high < self.before.low
        return apart and not 1 - LEAST < self.ratio < 1 + LEAST

    @property
    def verdict(self) -> str:
        if not self.is_real:
            return ""
        words = ("slower", "faster") if self.before.quantity == SECONDS else ("more", "less")
        return words[self.ratio < 1]


def changes(before: Record, after: Record) -> list[Change]:
    found = {each.key: each for each in after.measurements}
    return [Change(each, found[each.key]) for each in before.measurements if each.key in found]


def compared(before: Record, after: Record) -> str:
    """The lines that changed beyond the spread, worst first, after what differs in the conditions."""
    all_changes = changes(before, after)
    real = sorted((change for change in all_changes if change.is_real), key=lambda change: -change.ratio)
    parts = [f"A: {machine_line(before)}\nB: {machine_line(after)}", *_conditions(before, after)]
    if real:
        rows = [["", "n", "A", "B", "B / A", ""], *(_row(change) for change in real)]
        parts.append(aligned(rows))
    parts.append(
        f"{len(real)} of {len(all_changes)} figures changed beyond the spread (fastest run to upper quartile) and by "
        f"more than {100 * LEAST:.0f} %; the others did not."
    )
    for name, these, those in (("A", before, after), ("B", after, before)):
        missing = {each.key for each in these.measurements} - {each.key for each in those.measurements}
        if missing:
            parts.append(f"{len(missing)} figures are in {name} only.")
    return "\n\n".join(parts)


def _conditions(before: Record, after: Record) -> list[str]:
    """Two machines, or two versions of torch, compare too, but not our code."""
    told = ("processor", "gpu", "threads", "torch", "instructions", "device")
    machine = [(name, before.machine.get(name), after.machine.get(name)) for name in told]
    options = [(name, value, after.options.get(name)) for name, value in before.options.items()]
    different = [f"{name}: {a} in A, {b} in B" for name, a, b in machine + options if a != b]
    return ["not the same conditions\n" + "\n".join(different)] if different else []


def _row(change: Change) -> list[str]:
    before, after = change
    what = f"{before.quantity} of {before.work}, {before.dtype}: {before.method}"
    ratio = f"{change.ratio:.3g}" + ("" if before.quantity == ERROR else "×")
    return [
        what,
        f"{before.n:,}",
        shown(before.median, before.quantity),
        shown(after.median, before.quantity),
        ratio,
        change.verdict,
    ]
