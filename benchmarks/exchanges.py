"""The messages between ranks that share one sequence, as a timeline.

Linear attention exchanges states: from rank to rank (wave), or once per layer among all (scan). Softmax attention
passes keys and values around a ring. Both can exchange tokens for heads (all-to-all)."""

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.timeline import ALL, Run, Timeline


def wave(run: Run) -> Timeline:
    """Each attention begins with the state that the rank before has after its own. The projections before it, a quarter
    of a block's weights, wait for nobody."""
    line, depth, last = Timeline(run), run.model.depth, run.ranks - 1
    dense, attention = run.dense(run.local), run.linear(run.local)
    arrival = np.zeros(depth)
    for rank in range(run.ranks):
        for layer in range(depth):
            line.work(rank, dense.forward / 4)
            end = line.work(rank, attention.forward, arrival[layer])
            if rank < last:
                arrival[layer] = line.send(rank, end, run.model.state_bytes)
            line.work(rank, 3 * dense.forward / 4)
    line.work(ALL, run.head())
    arrival[:] = 0
    for rank in reversed(range(run.training * run.ranks)):
        for layer in reversed(range(depth)):
            line.work(rank, 3 * dense.backward / 4)
            end = line.work(rank, attention.backward, arrival[layer])
            if rank > 0:
                arrival[layer] = line.send(rank - 1, end, run.model.state_bytes)
            line.complete[layer] = line.work(rank, dense.backward / 4)
    return line


def in_step(run: Run, layer_pass: Callable[[Timeline, bool], None]) -> Timeline:
    """All ranks pass the same layer at the same time."""
    line = Timeline(run)
    for _ in range(run.model.depth):
        layer_pass(line, False)
    line.work(ALL, run.head())
    for layer in reversed(range(run.training * run.model.depth)):
        layer_pass(line, True)
        line.complete[layer] = line.free.max()
    return line


def scan(run: Run, prefix: bool = False) -> Timeline:
    """All ranks sum up their own tokens, gather the sums of all, add those before them, and go on from there. With
    `prefix`, ranks add what they receive before they send it on, so that few sums reach each."""
    block, summary, size = run.block(run.local), run.summary(run.local), run.model.state_bytes
    sums = size * (sum(run.machine.turns(run.ranks)) if prefix else run.ranks - 1)
    exchange = run.machine.prefix if prefix else run.machine.gather

    def layer_pass(line: Timeline, backward: bool) -> None:
        if run.ranks > 1:
            line.work(ALL, summary[backward])
            line.meet(exchange(size, run.ranks), sums)
        line.work(ALL, sums / run.machine.memory + block[backward])

    return in_step(run, layer_pass)


def all_to_all(run: Run, softmax: bool = False) -> Timeline:
    """Before its attention, each rank exchanges its tokens of q, k and v for all tokens of its heads; y goes back."""
    if run.ranks > run.model.heads:
        raise ValueError(f"all-to-all has at most as many ranks as heads, {run.model.heads}, but {run.ranks}")
    dense, attention = run.dense(run.local), run.softmax() if softmax else run.linear(run.local)
    size = run.local * run.model.dim * run.machine.element

    def layer_pass(line: Timeline, backward: bool) -> None:
        line.work(ALL, dense[backward] + attention[backward])
        # both exchanges; forward q, k, v and y, backward dy, dq, dk and dv
        seconds = run.machine.swap(3 * size, run.ranks) + run.machine.swap(size, run.ranks)
        line.meet(seconds, 4 * size * (run.ranks - 1) / run.ranks)

    return in_step(run, layer_pass)


def ring(run: Run) -> Timeline:
    """Keys and values go round while each rank attends to those that it has. Every rank has an early and a late part of
    the tokens (zigzag), so that all have the same work in each of P turns. Gradients go round in float32."""
    dense, attention = run.dense(run.local), run.softmax()
    size = 2 * run.local * run.model.dim

    def layer_pass(line: Timeline, backward: bool) -> None:
        ready = line.work(ALL, dense[backward]).copy()
        home = np.zeros(run.ranks)
        for turn in range(run.ranks):
            end = line.work(ALL, attention[backward] / run.ranks, ready)
            if turn < run.ranks - 1:
                ready = np.roll(line.send(ALL, ready, size * run.machine.element), 1)
            if backward and run.ranks > 1:
                home = np.roll(line.send(ALL, np.maximum(end, home), 4 * size), 1)
        line.work(ALL, 0, home)

    return in_step(run, layer_pass)


LINEAR, SOFTMAX = "linear", "softmax"


ENGINES: dict[tuple[str, str], Callable[[Run], Timeline]] = {
    (LINEAR, "wave"): wave,
    (LINEAR, "scan"): scan,
    (LINEAR, "prefix scan"): partial(scan, prefix=True),
    (LINEAR, "all-to-all"): all_to_all,
    (SOFTMAX, "ring"): ring,
    (SOFTMAX, "all-to-all"): partial(all_to_all, softmax=True),
}
"""The exchanges by the attention and the name."""
