"""Compare two records: ratios of medians that are beyond the spread of both."""

from linattn.cli.bench.record import SECONDS, Measurement, Record
from linattn.cli.bench.report import VIEWS, aligned

# smaller changes are left out, however significant, because they would not appear again on another day
LEAST = 0.05
CONDITIONS = ("processor", "gpu", "threads", "torch", "instructions", "device")


def ratio(before: Measurement, after: Measurement) -> float:
    return after.point.value / before.point.value if before.point.value else float("inf")


def differ(before: Measurement, after: Measurement) -> bool:
    """Tell whether the spreads do not overlap and the ratio of the medians differs from 1 by at least `LEAST`."""
    apart = after.point.low > before.point.high or after.point.high < before.point.low
    return apart and not 1 - LEAST < ratio(before, after) < 1 + LEAST


def comparison(a: Record, b: Record) -> str:
    """Return a text: the conditions that differ, then the figures that changed, the worst first."""
    found = {each.key: each for each in b.measurements}
    pairs = [(each, found[each.key]) for each in a.measurements if each.key in found]
    changes = sorted((pair for pair in pairs if differ(*pair)), key=lambda pair: -ratio(*pair))
    parts = [f"A: {a.machine_line}\nB: {b.machine_line}"]
    ours, theirs = (each.options | {name: each.machine.get(name) for name in CONDITIONS} for each in (a, b))
    if different := [f"{name}: {x} in A, {theirs.get(name)} in B" for name, x in ours.items() if x != theirs.get(name)]:
        parts.append("\n".join(["not the same conditions", *different]))
    if changes:
        parts.append(aligned([["", "n", "A", "B", "B / A", ""], *(_row(*pair) for pair in changes)]))
    limits = f"beyond the spread (fastest run to upper quartile) and by more than {LEAST:.0%}"
    parts.append(f"{len(changes)} of {len(pairs)} figures changed {limits}; the others did not.")
    only_a, only_b = (len(record.measurements) - len(pairs) for record in (a, b))
    parts.append(f"{only_a} figures are in A only, {only_b} in B only.")
    return "\n\n".join(parts)


def _row(before: Measurement, after: Measurement) -> list[str]:
    quantity, workload, method, dtype, n = before.key
    medians = [VIEWS[quantity].text(each.point.value) for each in (before, after)]
    verdict = (("slower", "faster") if quantity == SECONDS else ("more", "less"))[ratio(before, after) < 1]
    return [f"{quantity} of {workload}, {dtype}: {method}", f"{n:,}", *medians, f"{ratio(before, after):.3g}×", verdict]
