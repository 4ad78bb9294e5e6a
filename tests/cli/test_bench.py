"""The benchmark itself: what is asked for is measured or said to be missing, and the report has all of it.

The figures are the machine's, so no test looks at how large they are."""

import dataclasses
import json
import math
import re
import time
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.utils._pytree import tree_leaves

from linattn.attention import ATTENTIONS, SoftmaxAttention, map_state, named_attention, traits
from linattn.cli.bench import SOFTMAX, WORKLOADS
from linattn.cli.bench.attentions import prepare, state_at
from linattn.cli.bench.command import case_groups, default_methods
from linattn.cli.bench.compare import comparison, differ
from linattn.cli.bench.measure import Benchmark, Cost, Workload, call_cost, interleaved_times
from linattn.cli.bench.record import BYTES, SECONDS, Case, Measurement, Record, Setup, read_record, write_record
from linattn.cli.bench.report import SPEED_UP, panels
from linattn.cli.main import main

METHODS = ("softmax", "elu", "local+elu")
GATED = [name for name in (*ATTENTIONS, "local+gated_delta") if traits(name).gated]
SIZES = ("--heads", "2", "--head-dim", "8", "--window", "16", "--repeats", "2", "--threads", "1", "--device", "cpu")
TINY = Setup(heads=2, head_dim=8, window=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of all workloads, with time enough on any machine."""
    out = tmp_path_factory.mktemp("bench")
    options = ["--methods", ",".join(METHODS), "--lengths", "64,65", "--budget", "10000"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["linattn", "bench", "--out", str(out), *options, *SIZES])
        assert main() == 0
    return out


@pytest.fixture(scope="module")
def record(folder) -> Record:
    return read_record(folder / "bench.json")


def measured(*values: float, method: str = "elu", n: int = 64, work: str = "forward") -> Measurement:
    return Measurement(work, method, "float32", n, SECONDS, values)


def holding(record: Record, *measurements: Measurement) -> Record:
    return dataclasses.replace(record, measurements=measurements)


def test_every_method_is_there(record):
    """Time and memory of all that was asked for, and nothing else."""
    measured = [each.key for each in record.measurements]
    expected = product((SECONDS, BYTES), WORKLOADS, METHODS, ("float32",), (64, 65))
    assert sorted(measured) == sorted(expected) and not record.dropped


def test_the_record_says_where_how_and_with_what(record):
    assert record.machine["torch"] == torch.__version__
    assert record.machine["threads"] == 1
    assert record.command.startswith("linattn bench --out ")
    assert "--methods softmax,elu,local+elu" in record.command
    assert "--lengths 64,65" in record.command
    assert "--compare" not in record.command


def test_the_report_is_one_file_that_needs_no_other(folder, record):
    page = (folder / "report.html").read_text("utf-8")
    assert not re.search(r"<(script|img|link|iframe)\b|@import|src=", page)
    assert all(link.startswith("#") for link in re.findall(r'href="([^"]*)', page))
    drawings = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(drawings) == page.count("<figure ") == len(panels(read_record(folder / "bench.json"))) == 9
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    for method in METHODS:
        assert f"<th>{method}</th>" in page
    # which prefix a time has depends on the machine
    for unit in ("s", "B"):
        assert re.search(rf"\d \w?{unit}\b", page)


def test_ids_of_the_pictures_do_not_meet(folder):
    ids = re.findall(r'\bid="([^"]+)"', (folder / "report.html").read_text("utf-8"))
    assert len(ids) == len(set(ids))


def test_a_record_is_drawn_again_without_measuring(folder, tmp_path, capsys):
    assert main(["bench", "--redraw", str(folder / "bench.json"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_bytes() == (folder / "report.html").read_bytes()
    assert "median time per call" in capsys.readouterr().out
    assert (tmp_path / "bench.json").read_bytes() == (folder / "bench.json").read_bytes()


def test_a_record_comes_back_as_it_was(record, tmp_path):
    write_record(record, tmp_path / "a.json")
    assert read_record(tmp_path / "a.json") == record


def test_what_the_budget_does_not_allow_is_said(tmp_path, capsys, monkeypatch):
    # else a machine with less memory refuses the same length for its memory
    monkeypatch.setattr(Benchmark.__module__ + ".MEMORY_SHARE", math.inf)
    options = ["--methods", "softmax,elu", "--workloads", "training", "--lengths", "64,4194304"]
    assert main(["bench", "--out", str(tmp_path), "--budget", "60", *options, *SIZES]) == 0
    reason = "training, float32, from n = 4,194,304 on, no time was left"
    dropped = read_record(tmp_path / "bench.json").dropped
    assert set(dropped) == {reason} and sorted(dropped[reason]) == ["elu", "softmax"]
    assert f"not measured: {reason}: " in capsys.readouterr().out
    assert f"<li>{reason}: " in (tmp_path / "report.html").read_text("utf-8")


def test_a_doubled_time_is_told(record):
    before = holding(record, measured(1.0, 1.1, 1.2, 1.1, 5.0), measured(1.0, 1.1, 1.2, n=128))
    after = holding(record, measured(2.0, 2.2, 2.4, 2.2, 2.0), measured(1.0, 1.1, 1.2, n=128))
    assert [differ(*pair) for pair in zip(before.measurements, after.measurements, strict=True)] == [True, False]
    assert "1 of 2 figures changed" in comparison(before, after) and "slower" in comparison(before, after)
    assert "faster" in comparison(after, before)


@pytest.mark.parametrize("values", [(1.05, 1.15, 1.25), (1.3, 1.15, 1.6), (0.9, 1.0, 1.1)])
def test_what_is_within_the_spread_is_not_told(record, values):
    before, after = (holding(record, measured(*each)) for each in ((1.0, 1.1, 1.2), values))
    assert "0 of 1 figures changed" in comparison(before, after)


def test_small_changes_without_spread_are_not_told():
    assert not differ(measured(1.0), measured(1.04))
    assert differ(measured(1.0), measured(1.06))


def test_the_worst_change_comes_first(record):
    lengths = (64, 128, 256)
    before, after = (
        holding(record, *(measured(seconds, n=n) for seconds, n in zip(times, lengths, strict=True)))
        for times in ((1.0, 1.0, 1.0), (2.0, 4.0, 0.5))
    )
    ratios = [word for word in comparison(before, after).split() if word.endswith("×")]
    assert ratios == ["4×", "2×", "0.5×"]


def test_compare_says_what_differs_in_the_conditions_and_what_is_missing(folder, record, tmp_path, capsys):
    other = dataclasses.replace(record, machine=record.machine | {"threads": 7}, measurements=record.measurements[1:])
    write_record(other, tmp_path / "other.json")
    assert main(["bench", "--compare", str(folder / "bench.json"), str(tmp_path / "other.json")]) == 0
    shown = capsys.readouterr().out
    assert "threads: 1 in A, 7 in B" in shown
    assert "1 figures are in A only, 0 in B only" in shown
    assert "0 of" in shown


@pytest.fixture
def costs(monkeypatch) -> dict[str, Cost]:
    """The cost of each method at the length 1024, which nothing measures; the time is that of the memory's call."""
    costs: dict[str, Cost] = {}
    powers = {"softmax": 2}

    def cost(prepare, setup, case, patience):
        bytes_, seconds = costs[case.method]
        return Cost(bytes_ * case.n / 1024, seconds * (case.n / 1024) ** powers.get(case.method, 1))

    monkeypatch.setattr("linattn.cli.bench.measure.call_cost", cost)
    monkeypatch.setattr(
        "linattn.cli.bench.measure.interleaved_times",
        lambda calls, *_, **__: {case: [cost(None, None, case, None).seconds] for case in calls},
    )
    return costs


def benchmark(seconds: float, prepare=lambda setup, case: prepare_nothing) -> Benchmark:
    return Benchmark(prepare, TINY, repeats=2, deadline=time.monotonic() + seconds)


prepare_nothing = Workload(lambda: None)


def lengths(measuring: Benchmark, method: str) -> list[int]:
    return [each.n for each in measuring.measurements if (each.method, each.quantity) == (method, SECONDS)]


def test_slow_curves_end_early_and_fast_ones_go_on(costs):
    costs |= {"elu": Cost(0.0, 0.1), "softmax": Cost(0.0, 5.0)}
    measuring = benchmark(200)
    for n in (1024, 2048, 4096):
        measuring.measure([Case("forward", method, "float32", n) for method in ("elu", "softmax")])
    assert lengths(measuring, "elu") == [1024, 2048, 4096]
    assert lengths(measuring, "softmax") == [1024]
    # once, from the first missing length on
    assert measuring.dropped == {"forward, float32, from n = 2,048 on, no time was left": ["softmax"]}


@pytest.mark.parametrize("seconds", [0.01, 0.1, 1.0, 10.0])
def test_what_a_group_is_predicted_to_take_leaves_time_for_the_next(costs, seconds):
    methods = ("softmax", "elu", "exp", "favor")
    costs |= {name: Cost(0.0, seconds) for name in methods}
    measuring = benchmark(100)
    measuring.measure([Case("forward", name, "float32", 1024) for name in methods])
    assert sum(len(lengths(measuring, name)) for name in methods) * seconds * 6 <= 50


def test_what_needs_too_much_memory_is_not_tried(costs):
    costs["elu"] = Cost(2.0**30, 0.0)
    measuring = benchmark(math.inf)
    measuring.measure([Case("forward", "elu", "float32", 2**10)])
    measuring.measure([Case("forward", "elu", "float32", 2**40)])
    assert lengths(measuring, "elu") == [2**10]
    (reason,) = measuring.dropped
    assert "more than 60% of the memory" in reason


def test_a_method_that_fails_is_said_to_and_the_others_go_on():
    """Both come back from another process: the error and the figure."""
    measuring = Benchmark(prepare, TINY, repeats=1, deadline=time.monotonic() + 600)
    measuring.measure([Case("forward", method, "float32", 64) for method in ("linformer", "elu")])
    message = "Linformer mixes the whole sequence into every key, so it cannot be causal"
    assert measuring.dropped == {f"forward, float32, from n = 64 on, {message}": ["linformer"]}
    assert [(each.method, each.quantity) for each in measuring.measurements] == [("elu", BYTES), ("elu", SECONDS)]


def test_a_call_that_lasts_too_long_is_given_up():
    with pytest.raises(RuntimeError, match="no time was left"):
        call_cost(prepare, Setup(), Case("training", "elu", "float32", 2**20), 0.5)


def test_the_plan_goes_from_short_to_long():
    options = {"workloads": WORKLOADS, "methods": METHODS, "dtypes": ("float32",), "lengths": (64, 128)}
    groups = case_groups(options)
    lengths = [case.n for group in groups for case in group]
    assert lengths == sorted(lengths) and len(lengths) == 2 * len(WORKLOADS) * len(METHODS)
    assert all(len({(case.n, case.workload, case.dtype) for case in group}) == 1 for group in groups)


def test_methods_take_turns_and_each_is_called_before_it_is_timed():
    """A call that sleeps longer than the least span is made twice per turn, and its second duration is told."""
    calls = []

    def call(name):
        calls.append(name)
        time.sleep(0.1 if len(calls) % 2 else 0.02)

    times = interleaved_times({"a": lambda: call("a"), "b": lambda: call("b")}, 2)
    assert calls == ["a", "a", "b", "b"] * 2
    assert all(len(each) == 2 and 0.02 <= min(each) <= max(each) < 0.1 for each in times.values())


def test_short_calls_are_repeated():
    calls = []
    ((seconds,),) = interleaved_times({"a": lambda: calls.append("a")}, 1).values()
    assert 0 < seconds < 1e-3 and len(calls) > 100


def test_the_deadline_leaves_one_round():
    times = interleaved_times({"a": lambda: None, "b": lambda: None}, 5, deadline=-math.inf)
    assert {name: len(each) for name, each in times.items()} == {"a": 1, "b": 1}


@pytest.mark.parametrize("work", WORKLOADS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["local+elu", "local+gated_delta"])
def test_every_work_does_the_same_when_called_again(work, dtype, method):
    prepared = prepare(TINY, Case(work, method, dtype, 33))
    first, second = ([x for x in tree_leaves(prepared.call()) if x is not None] for _ in range(2))
    assert first and all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    "method, causal",
    [
        *((name, True) for name in dict.fromkeys((*default_methods(True), *GATED))),
        *((name, False) for name in default_methods(False)),
    ],
)
def test_every_method_can_be_trained(method, causal):
    prepared = prepare(dataclasses.replace(TINY, causal=causal), Case("training", method, "float32", 33))
    gradients = prepared.call()
    assert [x.shape for x in gradients[:3]] == 3 * [(1, 2, 33, 8)]
    assert len(gradients) >= 3 + (method in GATED)
    assert all(x.isfinite().all() and x.any() for x in gradients)


@pytest.mark.parametrize("method", ["softmax", "elu", "local", "retention"])
def test_the_past_is_as_long_as_it_would_be(method):
    """Made at once, it has the shapes that reading every token leaves."""
    inner = named_attention(method, num_heads=2, head_dim=8, causal=True, window=16)

    def read(n):
        return inner.extend(*torch.randn(3, 1, 2, n, 8))[1]

    shapes = []
    for state in (state_at(read, 200, 16), read(200)):
        found = []
        map_state(lambda x, found=found: found.append(x.shape) or x, state)
        shapes.append(found)
    assert shapes[0] == shapes[1]


def test_only_softmax_grows():
    _, state = SoftmaxAttention(causal=True).extend(*torch.randn(3, 1, 2, 3, 8))
    assert state_at(lambda n: (state, None), 10, 16)[0].k.shape == (1, 2, 10, 8)


def test_the_size_of_the_state_is_that_of_its_tensors(record):
    """Bytes of float32: softmax keeps all keys and values, elu + 1 keeps S and z, and a process adds nothing."""
    sizes = [each for each in record.measurements if (each.quantity, each.workload) == (BYTES, "decoding")]
    heads, d = record.options["heads"], record.options["head_dim"]
    expected = {"softmax": lambda n: 4 * heads * n * 2 * d, "elu": lambda n: 4 * heads * (d * d + d)}
    for method, size in expected.items():
        assert any(each.method == method for each in sizes)
        assert all(each.values == (size(each.n),) for each in sizes if each.method == method)
        assert call_cost(prepare, TINY, Case("decoding", method, "float32", 1000)).bytes == size(1000)


def test_every_picture_has_a_sentence_at_the_top(folder):
    page = (folder / "report.html").read_text("utf-8")
    linked = re.findall(r'<li><a href="#([^"]+)', page)
    assert linked == re.findall(r'<figure id="([^"]+)', page)


def test_sentences_compare_the_best_method_with_softmax(record):
    slow = [measured(seconds, method="softmax", n=n) for n, seconds in ((64, 2.0), (128, 6.0))]
    fast = [measured(seconds, n=n) for n, seconds in ((64, 1.0), (128, 1.5), (256, 3.0))]
    worse = [measured(9.0, method="taylor", n=128)]
    time_, speed_up = panels(holding(record, *slow, *fast, *worse))
    assert time_.sentence == "forward, float32, n = 128: elu takes 1.5 s, softmax takes 6.0 s."
    assert speed_up.sentence == "forward, float32, n = 128: elu is 4 × as fast as softmax."
    (alone,) = panels(holding(record, *fast))
    assert alone.sentence == "forward, float32, n = 256: elu takes 3.0 s."
    (only,) = panels(holding(record, *slow))
    assert only.sentence == "forward, float32, n = 128: softmax takes 6.0 s."


def test_softmax_is_named_only_where_it_was_measured(folder, tmp_path, capsys):
    """Neither the page nor the tables say that it was measured, or that something is faster."""
    assert "softmax was measured" in (folder / "report.html").read_text("utf-8")
    raw = json.loads((folder / "bench.json").read_text())
    raw["measurements"] = [each for each in raw["measurements"] if each["method"] != SOFTMAX]
    raw["options"]["methods"].remove(SOFTMAX)
    raw["command"] = "linattn bench --methods elu,local+elu"
    (tmp_path / "a.json").write_text(json.dumps(raw))
    assert main(["bench", "--redraw", str(tmp_path / "a.json"), "--out", str(tmp_path)]) == 0
    page = re.sub(r"<svg .*?</svg>", "", (tmp_path / "report.html").read_text("utf-8"), flags=re.DOTALL)
    assert "<th>elu</th>" in page and "Best methods" in page
    assert "softmax" not in page and "softmax" not in capsys.readouterr().out


def test_the_record_in_the_docs_is_drawn_and_compared(tmp_path, capsys):
    committed = Path(__file__).parents[2] / "docs" / "bench.json"
    raw = json.loads(committed.read_text("utf-8"))
    # drawing all of it takes long
    raw["measurements"] = [each for each in raw["measurements"] if (each["dtype"], each["n"]) == ("float32", 256)]
    (tmp_path / "part.json").write_text(json.dumps(raw))
    assert main(["bench", "--redraw", str(tmp_path / "part.json"), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    for method in raw["options"]["methods"]:
        assert f"<th>{method}</th>" in page
    assert main(["bench", "--compare", str(committed), str(committed)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\b0 of [1-9]\d+ figures changed", shown)
    assert "not the same conditions" not in shown


WRONG = {
    "no such method": (("--methods", "elu,nonsense"), "'nonsense' is no attention"),
    "no method that is causal": (("--methods", "elu,linformer"), "cannot be causal"),
    "heads that do not split": (("--methods", "local+elu", "--heads", "3"), "3 heads do not split equally"),
    "no such work": (("--workloads", "flying"), "each must be one of forward, training, decoding, but is 'flying'"),
    "no such dtype": (("--dtypes", "int8"), "each must be one of float32, "),
    "no length": (("--lengths", "64,0"), "must be a whole number of at least 1"),
    "decoding without order": (("--not-causal", "--workloads", "decoding"), "decoding is causal"),
    "nothing to compare": (("--compare", "a.json", "b.json"), "No such file or directory: 'a.json'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_in_a_line(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments, expected = WRONG[case]
    try:
        status = main(["bench", *arguments])
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert not any(tmp_path.iterdir())


def test_a_file_that_is_no_benchmark_is_told(tmp_path, capsys):
    for content in ("{}", "[]", "not JSON", json.dumps({"format": 99})):
        (tmp_path / "a.json").write_text(content)
        assert main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 2
        assert "a.json" in capsys.readouterr().err


def test_a_place_that_takes_no_report_is_told_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linattn.cli.bench.command.measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    for out in ("file", "file/below"):
        assert main(["bench", "--out", str(tmp_path / out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("linattn bench: choose another --out: ") and str(tmp_path / "file") in line


def test_a_wrong_method_leaves_no_folder(tmp_path, capsys):
    assert main(["bench", "--out", str(tmp_path / "new"), "--methods", "linformer"]) == 2
    assert "cannot be causal" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_record_is_compared_or_drawn_again(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--compare", "a", "b", "--redraw", "a"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_ratios_have_their_spread_around_them(record):
    values = {"softmax": (6.0, 8.0, 8.0, 9.0), "elu": (1.0, 2.0, 2.0, 4.0)}
    every = panels(holding(record, *(measured(*each, method=method) for method, each in values.items())))
    (panel,) = (each for each in every if each.quantity == SPEED_UP)
    low, value, high = panel.curves["elu"][64]
    assert (value, high) == (4.0, 8.0) and 2 < low < 4
