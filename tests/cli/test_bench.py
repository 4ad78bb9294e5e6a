"""The benchmark itself: what is asked for is measured or said to be missing, and the report has all of it.

The figures are the machine's, so no test looks at how large they are."""

import dataclasses
import json
import math
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from linattn.attention import ATTENTIONS, SoftmaxAttention, map_state, named_attention, traits
from linattn.cli.bench import MODEL_TRAINING, RATE, UNIFORM
from linattn.cli.bench.command import default_methods
from linattn.cli.bench.compare import changes, compared
from linattn.cli.bench.features import FIXED, RANDOM, measure_features
from linattn.cli.bench.measure import Found, Measuring, alternate, peak_memory, plan, state_size
from linattn.cli.bench.peers import PEERS, installed
from linattn.cli.bench.record import (
    BYTES,
    SECONDS,
    STATE_BYTES,
    Case,
    Dropped,
    Measurement,
    Record,
    Setup,
    read_record,
    write_record,
)
from linattn.cli.bench.report import SPEED_UP, all_curves, dropped_lines, pictures
from linattn.cli.bench.workloads import PREPARE, prepare, state_at
from linattn.cli.main import main

METHODS = ("softmax", "elu", "local+elu")
GATED = [name for name in (*ATTENTIONS, "local+gated_delta") if traits(name).gated]
SIZES = ("--heads", "2", "--head-dim", "8", "--window", "16", "--repeats", "2", "--threads", "1", "--device", "cpu")
TINY = Setup(heads=2, head_dim=8, window=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A smoke run of all there is, with time enough on any machine but for the feature maps."""
    out = tmp_path_factory.mktemp("bench")
    asked = ["--methods", ",".join(METHODS), "--lengths", "64,65", "--budget", "10000"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linattn.cli.bench.command.TRAINING_MOST", 1.0)
        patch.setattr("linattn.cli.bench.command.FEATURES_SHARE", 2e-4)
        patch.setattr("sys.argv", ["linattn", "bench", "--out", str(out), *asked, *SIZES])
        assert main() == 0
    return out


@pytest.fixture(scope="module")
def record(folder) -> Record:
    return read_record(folder / "bench.json")


def measured(*values: float, method: str = "elu", n: int = 64, work: str = "forward") -> Measurement:
    return Measurement(work, method, "float32", n, SECONDS, values)


def holding(record: Record, *measurements: Measurement) -> Record:
    return dataclasses.replace(record, measurements=measurements)


def test_every_method_is_there_or_said_to_be_missing(record):
    found = {(each.quantity, each.workload, each.method, each.n) for each in record.measurements}
    missing = {(each.workload, each.method, each.n) for each in record.dropped}
    for work in ("forward", "training", "decoding"):
        for method in METHODS:
            for n in (64, 65):
                size = STATE_BYTES if work == "decoding" else BYTES
                both = {(quantity, work, method, n) for quantity in (SECONDS, size)}
                assert both <= found or (work, method, n) in missing
    assert any(work == "forward" and quantity == SECONDS for quantity, work, *_ in found)


def test_every_feature_map_has_an_error(record):
    found = {each.method for each in record.measurements if each.quantity == "error"}
    assert {UNIFORM, *FIXED} <= found <= {UNIFORM, *FIXED, *RANDOM}


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
    assert len(drawings) == page.count("<figure>") >= 5
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    for method in METHODS:
        assert f"<th>{method}</th>" in page
    for unit in ("ms", "MiB"):
        assert f" {unit}" in page


def test_ids_of_the_pictures_do_not_meet(folder):
    ids = re.findall(r'\bid="([^"]+)"', (folder / "report.html").read_text("utf-8"))
    assert len(ids) == len(set(ids))


def test_a_record_is_drawn_again_without_measuring(folder, tmp_path, capsys):
    assert main(["bench", "--redraw", str(folder / "bench.json"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_bytes() == (folder / "report.html").read_bytes()
    assert "median time per call" in capsys.readouterr().out
    assert not (tmp_path / "bench.json").exists()


def test_a_record_comes_back_as_it_was(record, tmp_path):
    write_record(record, tmp_path / "a.json")
    assert read_record(tmp_path / "a.json") == record


def test_what_the_budget_does_not_allow_is_said(tmp_path, capsys):
    asked = ["--methods", "softmax,elu", "--workloads", "training", "--lengths", "64,4194304", "--no-features"]
    assert main(["bench", "--out", str(tmp_path), "--budget", "30", *asked, *SIZES]) == 0
    dropped = read_record(tmp_path / "bench.json").dropped
    assert {(each.method, each.n) for each in dropped} == {("softmax", 4194304), ("elu", 4194304)}
    assert "training, float32, from n = 4,194,304 on, no time was left: elu (" in capsys.readouterr().out


def test_a_doubled_time_is_told(record):
    before = holding(record, measured(1.0, 1.1, 1.2, 1.1, 5.0), measured(1.0, 1.1, 1.2, n=128))
    after = holding(record, measured(2.0, 2.2, 2.4, 2.2, 2.0), measured(1.0, 1.1, 1.2, n=128))
    (change, same) = changes(before, after)
    assert change.is_real and change.verdict == "slower"
    assert not same.is_real
    assert "1 of 2 figures changed" in compared(before, after)
    assert "faster" in compared(after, before)


@pytest.mark.parametrize("values", [(1.05, 1.15, 1.25), (1.3, 1.15, 1.6), (0.9, 1.0, 1.1)])
def test_what_is_within_the_spread_is_not_told(record, values):
    before, after = (holding(record, measured(*each)) for each in ((1.0, 1.1, 1.2), values))
    assert "0 of 1 figures changed" in compared(before, after)


def test_small_changes_without_spread_are_not_told(record):
    before, after = holding(record, measured(1.0)), holding(record, measured(1.04))
    assert not changes(before, after)[0].is_real
    assert changes(before, holding(record, measured(1.06)))[0].is_real


def test_the_worst_change_comes_first(record):
    lengths = (64, 128, 256)
    before, after = (
        holding(record, *(measured(seconds, n=n) for seconds, n in zip(times, lengths, strict=True)))
        for times in ((1.0, 1.0, 1.0), (2.0, 4.0, 0.5))
    )
    ratios = [word for word in compared(before, after).split() if word.endswith("×")]
    assert ratios == ["4×", "2×", "0.5×"]


def test_compare_says_what_differs_in_the_conditions_and_what_is_missing(folder, record, tmp_path, capsys):
    other = dataclasses.replace(record, machine=record.machine | {"threads": 7}, measurements=record.measurements[1:])
    write_record(other, tmp_path / "other.json")
    assert main(["bench", "--compare", str(folder / "bench.json"), str(tmp_path / "other.json")]) == 0
    shown = capsys.readouterr().out
    assert "threads: 1 in A, 7 in B" in shown
    assert "1 figures are in A only" in shown
    assert "0 of" in shown


def test_slow_curves_end_early_and_fast_ones_go_on(monkeypatch):
    monkeypatch.setattr(Measuring, "_measure_memory", lambda self, case: True)
    monkeypatch.setattr(Measuring, "_measure_time", lambda self, cases: done.extend(cases))
    done: list[Case] = []
    groups = [[Case("forward", method, "float32", n) for method in ("elu", "softmax")] for n in (1024, 2048, 4096)]
    measuring = Measuring(TINY, repeats=2, deadline=time.monotonic() + 200)
    measuring.last = {groups[0][0].curve: (1024, Found(0.0, 0.1)), groups[0][1].curve: (1024, Found(0.0, 5.0))}
    for group in groups:
        measuring.measure(group)
    assert [case.n for case in done if case.method == "elu"] == [1024, 2048, 4096]
    assert [case.n for case in done if case.method == "softmax"] == [1024]
    assert [(each.method, each.n) for each in measuring.dropped] == [("softmax", 2048), ("softmax", 4096)]
    assert all("no time was left" in each.reason for each in measuring.dropped)


def test_what_a_group_is_predicted_to_take_leaves_time_for_the_next():
    cases = [Case("forward", method, "float32", 64) for method in ("softmax", "elu", "exp", "favor")]
    for seconds in (0.01, 0.1, 1.0, 10.0):
        measuring = Measuring(TINY, repeats=2, deadline=time.monotonic() + 100)
        measuring.last = {case.curve: (64, Found(0.0, seconds)) for case in cases}
        assert len(measuring._within_limits(cases)) * seconds * 8 <= 50


def test_what_needs_too_much_memory_is_not_tried():
    case = Case("forward", "elu", "float32", 2**40)
    measuring = Measuring(TINY, repeats=1, deadline=math.inf)
    measuring.last[case.curve] = 2**10, Found(2.0**30, 0.0)
    measuring.measure([case])
    assert not measuring.measurements
    assert "GiB of memory" in measuring.dropped[0].reason


def test_a_method_that_fails_is_said_to_and_the_others_go_on():
    """Both come back from another process: the error and the figure."""
    cases = [Case("forward", method, "float32", 64) for method in ("linformer", "elu")]
    measuring = Measuring(TINY, repeats=1, deadline=time.monotonic() + 60)
    measuring.measure(cases)
    assert [(each.method, each.reason) for each in measuring.dropped] == [
        ("linformer", "Linformer mixes the whole sequence into every key, so it cannot be causal")
    ]
    assert {each.quantity for each in measuring.measurements if each.method == "elu"} == {BYTES, SECONDS}


def test_a_call_that_lasts_too_long_is_given_up():
    with pytest.raises(RuntimeError, match="no time was left"):
        peak_memory(Setup(), Case("training", "elu", "float32", 2**20), 0.5)


def test_the_plan_goes_from_short_to_long_and_leaves_out_what_cannot_be():
    groups = plan(["forward", "decoding"], ["elu", "performer-pytorch"], ["float32"], [64, 128])
    lengths = [case.n for group in groups for case in group]
    assert lengths == sorted(lengths)
    assert not any(case.method in PEERS and case.workload == "decoding" for group in groups for case in group)
    assert all(len({(case.n, case.workload, case.dtype) for case in group}) == 1 for group in groups)


def test_methods_take_turns_and_each_is_called_before_it_is_timed():
    """A call that sleeps longer than the least span is made twice per turn, and its second duration is told."""
    calls = []

    def call(name):
        calls.append(name)
        time.sleep(0.1 if len(calls) % 2 else 0.02)

    times = alternate({"a": lambda: call("a"), "b": lambda: call("b")}, 2)
    assert calls == ["a", "a", "b", "b"] * 2
    assert all(len(each) == 2 and 0.02 <= min(each) <= max(each) < 0.1 for each in times.values())


def test_short_calls_are_repeated():
    calls = []
    ((seconds,),) = alternate({"a": lambda: calls.append("a")}, 1).values()
    assert 0 < seconds < 1e-3 and len(calls) > 100


def test_the_deadline_leaves_one_round():
    times = alternate({"a": lambda: None, "b": lambda: None}, 5, deadline=-math.inf)
    assert {name: len(each) for name, each in times.items()} == {"a": 1, "b": 1}


@pytest.mark.parametrize("work", PREPARE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["local+elu", "local+gated_delta"])
def test_every_work_does_the_same_when_called_again(work, dtype, method):
    """A step of training does not: it has moved the weights, and says nothing."""
    prepared = prepare(TINY, Case(work, method, dtype, 33))
    first, second = ([torch.as_tensor(x) for x in tree_leaves(prepared.call()) if x is not None] for _ in range(2))
    assert bool(first) == (work != MODEL_TRAINING)
    assert all(map(torch.equal, first, second))


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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_installed_does_its_work(name, causal):
    if name not in installed(causal):
        pytest.skip("not installed, or it cannot be so")
    y, (dq, *_) = (
        prepare(dataclasses.replace(TINY, causal=causal), Case(work, name, "float32", 128)).call()
        for work in ("forward", "training")
    )
    assert y.shape == dq.shape == (1, 2, 128, 8)
    assert y.any() and dq.any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["performer-pytorch (efficient)", "linear-attention-transformer"])
def test_a_peer_is_the_method_that_it_is_compared_with(name, causal):
    if name not in installed(causal):
        pytest.skip("not installed")
    setup = dataclasses.replace(TINY, causal=causal)
    theirs, ours = (
        prepare(setup, Case("forward", method, "float32", 64)).call()
        for method in (name, PEERS[name].counterpart[causal])
    )
    # theirs have floors under their sums, and a scale of their own where keys are normalised
    cosine = torch.nn.functional.cosine_similarity(theirs.flatten(), ours.flatten(), 0)
    assert cosine > 0.9999


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
    sizes = [each for each in record.measurements if (each.quantity, each.workload) == (STATE_BYTES, "decoding")]
    heads, d = record.options["heads"], record.options["head_dim"]
    expected = {"softmax": lambda n: 4 * heads * n * 2 * d, "elu": lambda n: 4 * heads * (d * d + d)}
    for method, size in expected.items():
        assert any(each.method == method for each in sizes)
        assert all(each.values == (size(each.n),) for each in sizes if each.method == method)
        found = state_size(TINY, Case("decoding", method, "float32", 1000), math.inf)
        assert found.bytes == size(1000)


def test_every_picture_has_a_sentence_at_the_top(folder):
    page = (folder / "report.html").read_text("utf-8")
    linked = re.findall(r'<li><a href="#([^"]+)', page)
    assert linked == re.findall(r'<h2 id="([^"]+)', page)
    assert "token-float32" in linked


def test_sentences_compare_the_best_method_with_softmax(record):
    slow = [measured(seconds, method="softmax", n=n) for n, seconds in ((64, 2.0), (128, 6.0))]
    fast = [measured(seconds, n=n) for n, seconds in ((64, 1.0), (128, 1.5), (256, 3.0))]
    worse = [measured(9.0, method="taylor", n=128)]
    time_, speed_up = pictures(holding(record, *slow, *fast, *worse))
    assert time_.sentence == "forward at n = 128: elu takes 1.5 s, softmax takes 6 s."
    assert speed_up.sentence == "forward at n = 128: elu is 4 times as fast as softmax."
    (alone,) = pictures(holding(record, *fast))
    assert alone.sentence == "forward at n = 256: elu takes 3 s."


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


def test_products_are_the_limit_in_every_group(record):
    groups = {(each.workload, each.n) for each in record.measurements if each.quantity == SECONDS}
    with_rate = {(each.workload, each.n) for each in record.measurements if each.method == RATE}
    assert with_rate == {(work, n) for work, n in groups if work != "decoding"}


WRONG = {
    "no such method": (("--methods", "elu,nonsense"), "'nonsense' is no attention"),
    "no such work": (("--workloads", "flying"), "--workloads are of forward, training, decoding"),
    "no such dtype": (("--dtypes", "int8"), "--dtypes are of float32"),
    "no length": (("--lengths", "64,0"), "must be a whole number of at least 1"),
    "decoding without order": (("--not-causal", "--workloads", "decoding"), "are causal"),
    "nothing to compare": (("--compare", "a.json", "b.json"), "there is no a.json"),
    "no run": (("--model", "nowhere"), "there is no run in nowhere"),
    "no text": (("--text", "nowhere.txt"), "nowhere.txt"),
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
    assert expected in capsys.readouterr().err.splitlines()[-1]
    assert not any(tmp_path.iterdir())


def test_a_file_that_is_no_benchmark_is_told(tmp_path, capsys):
    for content in ("{}", "[]", "not JSON", json.dumps({"format": 99})):
        (tmp_path / "a.json").write_text(content)
        assert main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 2
        assert "a.json" in capsys.readouterr().err


def test_real_queries_and_keys_come_from_a_run(finished, tmp_path, capsys):
    """Its context is short, but its text is long enough to look at."""
    asked = ["--model", str(finished), "--methods", "elu", "--workloads", "forward", "--lengths", "64"]
    assert main(["bench", "--out", str(tmp_path), "--budget", "10", *asked, *SIZES]) == 0
    assert f"the model in {finished} on its validation data" in read_record(tmp_path / "bench.json").notes[0]


def test_a_place_that_takes_no_report_is_told_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linattn.cli.bench.command.measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    for out in ("file", "file/below"):
        assert main(["bench", "--out", str(tmp_path / out)]) == 2
        assert f"{tmp_path / 'file'} is no folder that can be written to" in capsys.readouterr().err


def test_a_wrong_name_leaves_no_folder(tmp_path, capsys):
    assert main(["bench", "--out", str(tmp_path / "new"), "--methods", "nonsense"]) == 2
    assert "'nonsense' is no attention" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_record_is_compared_or_drawn_again(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--compare", "a", "b", "--redraw", "a"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_reasons_are_told_as_they_are(record):
    """Only figures move behind the names of the methods that share a reason."""
    reasons = {"elu:3": "'elu:3' has 3 heads, but: see b.cpp:127] err == 0. x: can't", "elu": "no time was left: 3.5 s"}
    dropped = tuple(Dropped("forward", method, "float32", 64, reason) for method, reason in reasons.items())
    also = Dropped("forward", "favor", "float32", 64, "no time was left: 1,204.0 s")
    assert dropped_lines(dataclasses.replace(record, dropped=(*dropped, also))) == [
        f"forward, float32, from n = 64 on, {reasons['elu:3']}: elu:3",
        "forward, float32, from n = 64 on, no time was left: elu (3.5 s), favor (1,204.0 s)",
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_the_products_are_counted(causal):
    """In chunks of 64 where linear attention is causal; gradients need 7/2, 13/4 and 3 times as many."""
    setup, (q, k, v) = dataclasses.replace(TINY, causal=causal), torch.randn(3, 1, 2, 128, 8)

    def linear():
        if not causal:
            return q @ (k.mT @ v)
        queries, keys, values = (x.unflatten(-2, (2, 64)) for x in (q, k, v))
        return (queries @ keys.mT) @ values + queries @ (keys.mT @ values)

    products = {"softmax": lambda: (q @ k.mT) @ v, "elu": linear}
    for (method, call), more in zip(products.items(), (7 / 2, 13 / 4 if causal else 3), strict=True):
        with FlopCounterMode(display=False) as counter:
            call()
        # causal softmax has half of the matrix
        count = counter.get_total_flops() * (0.5 if method == "softmax" and causal else 1)
        assert prepare(setup, Case("forward", method, "float32", 128)).flop == count
        assert prepare(setup, Case("training", method, "float32", 128)).flop == more * count


def test_ratios_have_their_spread_around_them(record):
    values = {"softmax": (6.0, 8.0, 8.0, 9.0), "elu": (1.0, 2.0, 2.0, 4.0)}
    drawn = all_curves(holding(record, *(measured(*each, method=method) for method, each in values.items())))
    low, value, high = drawn["forward", "float32", SPEED_UP]["elu"][64]
    assert (value, high) == (4.0, 8.0) and 2 < low < 4


def test_random_features_have_the_same_error_each_time(monkeypatch):
    monkeypatch.setattr("linattn.cli.bench.features.COUNTS", (16,))
    layers = [tuple(torch.randn(3, 1, 2, 20, 8))]
    one, other = (list(measure_features(layers, math.inf)) for _ in range(2))
    assert one == other and len(one) == 1 + len(FIXED) + len(RANDOM)
