"""The simulation has the right limits: what one rank does, what free wires allow, and what goes over them."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.exchanges import ENGINES, LINEAR, SOFTMAX, all_to_all, ring, scan, wave
from benchmarks.scaling import HALF, MEASURED, OPTIONS, SIZES, check, main
from benchmarks.timeline import Machine, Model, Run, Timeline, Wire

FREE, SLOW = Wire(math.inf, 0), Wire(1e9, 1e-3)
MODEL = Model(depth=6, dim=64, heads=8, vocab=99)
RUN = Run(MODEL, Machine(1e10, 2e10, 1e9, FREE, FREE, node=4), 4096, 1, training=True)
every_engine = pytest.mark.parametrize("name", ENGINES, ids=" ".join)
both_works = pytest.mark.parametrize("training", [False, True])


def parts(run: Run, attention: str) -> float:
    """Add up the seconds of all tokens on one device."""
    inner = run.linear(run.tokens) if attention == LINEAR else replace(run, ranks=1).softmax()
    passes = 1 + run.training
    return MODEL.depth * sum((*run.dense(run.tokens)[:passes], *inner[:passes])) + replace(run, ranks=1).head()


@every_engine
@both_works
@pytest.mark.parametrize("wire", [FREE, SLOW])
def test_one_rank_is_the_sum_of_the_parts(name, training, wire):
    run = replace(RUN, training=training, machine=replace(RUN.machine, near=wire, far=wire))
    line = ENGINES[name](run)
    assert math.isclose(line.seconds(), parts(run, name[0]))
    assert line.num_bytes == 0


@both_works
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", [(LINEAR, "all-to-all"), (SOFTMAX, "all-to-all"), (SOFTMAX, "ring")], ids=" ".join)
def test_free_wires_are_ideal(name, ranks, training):
    run = replace(RUN, ranks=ranks, training=training)
    assert math.isclose(ENGINES[name](run).seconds(), parts(run, name[0]) / ranks)


@both_works
@pytest.mark.parametrize("prefix", [False, True])
def test_a_scan_costs_its_summary_and_the_sums_of_others(prefix, training):
    run = replace(RUN, ranks=8, training=training)
    sums = (4 if prefix else 7) * MODEL.state_bytes / run.machine.memory
    extra = MODEL.depth * sum(x + sums for x in run.summary(run.local)[: 1 + training])
    assert math.isclose(scan(run, prefix).seconds(), parts(run, LINEAR) / 8 + extra)


@both_works
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_wave_waits_for_attentions_only(ranks, training):
    """L blocks, and P − 1 attentions of the ranks before, also if there are more ranks than layers."""
    run = replace(RUN, model=replace(MODEL, vocab=0), ranks=ranks, training=training)
    run = replace(run, machine=replace(run.machine, node=8))
    block, attention = (sum(work(run.local)[: 1 + training]) for work in (run.block, run.linear))
    assert math.isclose(wave(run).seconds(), MODEL.depth * block + (ranks - 1) * attention)


@pytest.mark.parametrize("ranks", [2, 8])
def test_bytes(ranks):
    """A state per layer, whatever the length; keys and values, or tokens, of all others."""
    run = replace(RUN, ranks=ranks, training=False)
    state, element = MODEL.state_bytes, run.machine.element
    assert MODEL.state_bytes == 4 * 8 * 8 * 9
    for tokens in (4096, 40960):
        long, others = replace(run, tokens=tokens), ranks - 1
        keys = tokens / ranks * MODEL.dim * element
        expected = (
            (wave(long), state * others / ranks),
            (scan(long), state * others),
            (scan(long, prefix=True), state * {2: 1, 8: 4}[ranks]),
            (ring(long), 2 * keys * others),
            (all_to_all(long), 4 * keys * others / ranks),
        )
        for line, num_bytes in expected:
            assert math.isclose(line.bytes_per_layer(), num_bytes)


@every_engine
def test_wires_cost_time(name):
    """Every bandwidth and latency counts, near and far, also without the gradients of weights."""
    run = replace(RUN, ranks=8, training=False)
    wires = (Wire(1e7, 0), Wire(math.inf, 0.1))
    free = ENGINES[name](run).seconds()
    for machine in [replace(run.machine, **{place: wire}) for place in ("near", "far") for wire in wires]:
        assert ENGINES[name](replace(run, machine=machine)).seconds() > free


def test_a_ring_hides_transfers_behind_products():
    """Turns take the longer of both; a message that is longer than a turn's products sets the pace."""
    run = replace(RUN, ranks=4, training=False)
    turn, dense = run.softmax().forward / 4, run.dense(run.local).forward
    size = 2 * run.local * MODEL.dim * run.machine.element
    for factor in (0.5, 2):
        near = Wire(size / (factor * turn), 0)
        seconds = ring(replace(run, machine=replace(run.machine, near=near))).seconds()
        assert math.isclose(seconds, MODEL.depth * (dense + turn + 3 * turn * max(factor, 1)))


def test_the_last_gradients_go_home_in_a_ring():
    """All else is hidden: a message of keys and values takes a tenth of a turn, and their gradients two tenths."""
    run = replace(RUN, ranks=4)
    turns = [seconds / 4 for seconds in run.softmax()]
    near = Wire(10 * 2 * run.local * MODEL.dim * run.machine.element / turns[1], 0)
    line = ring(replace(run, machine=replace(run.machine, near=near)))
    seconds = MODEL.depth * (sum(run.dense(run.local)) + 4 * sum(turns) + 0.2 * turns[1]) + run.head()
    assert math.isclose(line.free.max(), seconds)


def test_gradients_of_weights_are_added_beside_the_backward_pass():
    """Those of the last layer are complete first; only what the backward pass cannot hide takes longer."""
    run = replace(RUN, ranks=4, model=replace(MODEL, vocab=0))
    line = Timeline(run)
    line.complete[:] = 10.0 * np.arange(6, 0, -1)
    line.free[:] = 60
    for seconds, expected in ((1.0, 61.0), (30.0, 10 + 6 * 30.0)):
        # 2 · 3 / 4 of the bytes go each way
        near = Wire(1.5 * 4 * 12 * MODEL.dim**2 / seconds, 0)
        line.run = replace(run, machine=replace(run.machine, near=near))
        assert math.isclose(line.seconds(), expected)


def test_impossible_numbers_of_ranks():
    with pytest.raises(ValueError, match="as many ranks as heads, 8, but 16"):
        all_to_all(replace(RUN, ranks=16))
    with pytest.raises(ValueError, match="a multiple of it, but are 6"):
        scan(replace(RUN, ranks=6))


def test_the_model_is_near_what_was_measured():
    rows = [line.split("|")[1:-1] for line in check()[2:]]
    assert len(rows) == 2 * len(MEASURED) == len(MEASURED) * len(HALF)
    for *_, predicted, measured in rows:
        assert math.isclose(float(predicted), float(measured), rel_tol=0.1)


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.scaling.DEVICES", [1, 2, 16])
    path = tmp_path / "scaling.svg"
    sizes = ["--depth", "2", "--dim", "64", "--heads", "8", "--tokens", "1000", "--devices", "2,16"]
    main([*sizes, "--picture", str(path)])
    printed = capsys.readouterr().out
    assert printed.count("more devices than heads") == 2
    assert "prefers-color-scheme" in path.read_text("utf-8")


@pytest.mark.parametrize("name", [*OPTIONS, *SIZES])
def test_every_option_changes_the_figures(name, capsys):
    sizes = {"depth": 2, "dim": 1024, "heads": 8, "vocab": 99}
    given = [f"--{size}={value}" for size, value in sizes.items()] + ["--tokens", "100000", "--devices", "2,16"]
    printed = []
    for changed in ([], [f"--{name}", str(OPTIONS[name][0] / 2 if name in OPTIONS else 2 * sizes[name])]):
        main([*given, *changed])
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the lines of tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_the_page_has_the_figures_of_the_program(capsys):
    """The seconds of training and the share of linear scaling for each length and number of devices."""
    main([])
    found: dict[str, list[list[str]]] = {}
    for attention, exchange, *figures in rows(capsys.readouterr().out):
        found.setdefault(f"{attention}, {exchange}", []).append(figures)
    page = (Path(__file__).parents[2] / "docs/devices.md").read_text("utf-8")
    _, _, *table = rows("| attention | exchange |" + page.partition("| attention | exchange |")[2].split("\n\n")[0])
    assert [(attention, exchange) for attention, exchange, *_ in table] == [*ENGINES]
    for attention, exchange, *cells in table:
        figures = found[f"{attention}, {exchange}"]
        seconds = [f"{x[2]}, {x[3].replace('%', ' %')}" if x[2] else "–" for x in figures]
        # the bytes of 64 devices and the shorter length
        assert cells == [*seconds, figures[1][4] or "–"]
