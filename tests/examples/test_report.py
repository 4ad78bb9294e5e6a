"""Tables and curves say what the runs say."""

import io
import json

import pytest
from matplotlib.axes import Axes

from examples.learning import haystack, library, points, report, run
from examples.learning.curves import draw, styles
from examples.learning.training import settings
from examples.learning.variants import VARIANTS

NAMES = (
    *report.TOGETHER,
    *report.TUNED,
    "rates",
    "scaling",
    "variants",
    "recall64-optimizers",
    "characters",
    "copying",
)
PAGE = "\n".join(f"before {name}\n<!-- table {name} -->\nold\n<!-- end -->\nafter" for name in NAMES)


def fake(task, method, seed, figures):
    """A run that was measured so often as there are figures."""
    training = run.TASKS[task].training
    points = [{"step": training.every * (i + 1), "loss": x, "accuracy": x} for i, x in enumerate(figures)]
    record = {"task": task, "method": method, "seed": seed, "curve": points, "cpu_seconds": 12.3, "parameters": 4567}
    return record | {"steps": training.steps} | settings(training)


def tuned(task, method, seed, bits, **chosen):
    """A run of 900 steps at a task whose methods are compared at their best."""
    return fake(task, method, seed, []) | {"curve": [{"step": 900, "bits": bits}]} | chosen


RUNS = [
    fake("copying", "elu", 1, [0.1] * 7 + [0.2] * 4 + [0.3]),
    fake("copying", "elu", 0, [0.9987]),
    fake("characters", "softmax", 0, [2.5, 1.8884]),
]


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_a_row_shows_both_seeds_at_each_moment_and_in_the_end():
    head, _, row = cells(report.table(run.TASKS["copying"], RUNS))
    assert head[:7] == [
        "method",
        *(f"seed {s}, at {m}" for m in ("2,000", "2,750") for s in (0, 1)),
        "seed 0",
        "seed 1",
    ]
    # what was solved before stays solved
    assert row[:7] == ["elu", "99.9 %", "20.0 %", "99.9 %", "20.0 %", "99.9 %", "30.0 %"]
    assert row[7:10] == ["250 / 3,000", "12 / 12", "4,567"]


def test_nats_have_three_digits():
    assert cells(report.table(run.TASKS["characters"], RUNS))[2][:3] == ["softmax", "1.888", "1,000"]


def test_tables_take_their_places_again_and_again():
    page = report.with_tables(PAGE, RUNS)
    assert report.with_tables(page, RUNS) == page
    assert page.count("old") == len(NAMES) - 2 and page.count("| 1.888 |") == 1
    assert page.count("before") == page.count("after") == len(NAMES)


def test_a_task_that_was_not_run_needs_no_place():
    assert report.with_tables(PAGE.replace("recall", "else"), RUNS).count("| method |") == 2


def test_a_page_without_a_place_is_refused():
    with pytest.raises(ValueError, match="table copying"):
        report.with_tables(PAGE.replace("copying", "else"), RUNS)


def test_the_state_of_linear_attention_is_constant_and_that_of_softmax_grows():
    task = run.TASKS["recall"]
    # S and z; two inputs of the gated convolution
    assert report.state_size(task, "elu") == 64 * 64 + 64 + 2 * 64
    assert report.state_size(task, "softmax") == 2 * task.length * 64 + 2 * 64


def test_tracking_has_one_table_with_places_of_the_trained_length_first():
    record = fake("parity", "elu", 0, [0.5])
    record["curve"][0]["accuracy_32"] = 0.7
    head, _, row = cells(report.joint_table(report.TOGETHER["tracking"], [record]))
    assert head[2:5] == ["parity, 17–32", "parity, 33–128", "swaps, 17–32"]
    assert row[:4] == ["elu", "4,224", "70.0 %", "50.0 % (150)"] and not any(row[4:]) and len(row) == len(head)


@pytest.mark.parametrize("task", ("recall", "characters", "copying"))
def test_curves_name_their_methods(tmp_path, task):
    path = tmp_path / "curves.svg"
    draw(run.TASKS[task], [*RUNS, fake("recall", "favor", 0, [0.01])], path)
    shown = path.read_text()
    assert "steps" in shown and "</svg>" in shown
    assert (">elu<" in shown) == (task == "copying") and (">softmax<" in shown) == (task == "characters")


def test_styles_differ():
    kinds = [tuple(style.values()) for style in styles(str(i) for i in range(88)).values()]
    assert len(set(kinds)) == 88


def test_recall_has_one_table_of_all_its_tasks_without_and_with_a_silu():
    early = fake("recall32", "elu+silu", 1, [0.1, 0.9995])
    runs = [early, fake("recall", "local", 0, [0.01] * 10), fake("recall32", "elu+silu", 0, [0.5] * 10), *RUNS]
    page = report.with_tables(PAGE, runs)
    assert page.count("old") == len(NAMES) - 3
    head, _, elu, local = cells(report.joint_table(report.TOGETHER["recall"], runs))
    pairs = ["16 pairs, 128 tokens", "32 pairs, 128 tokens", "64 pairs, 256 tokens"]
    assert head == ["method", "state", *pairs, *(f"with SiLU: {title}" for title in pairs)]
    # the largest state comes first; a run that ended sooner says when
    assert elu == ["elu", "4,288", "", "", "", "", "50.0 % / 100.0 % (400)", ""]
    assert local == ["local", "2,049", "1.0 %", "", "", "", "", ""]


def test_bytes_have_a_row_for_each_method_and_optimizer():
    methods = list(run.TASKS["bytes256"].methods)
    runs = [tuned("bytes1024", method, 0, 1.5, optimizer=name) for method in methods for name in ("adamw", "muon")]
    rows = cells(report.tuned_table(library.TASKS, runs))[2:]
    assert [row[:2] for row in rows] == [[report.label(run["method"]), run["optimizer"]] for run in runs]
    assert all(row[3:] == ["", "", "1.500 (900)", "0.002, 100", "", ""] for row in rows)


def test_a_variant_has_a_row_of_its_own():
    variants = [None, *VARIANTS]
    runs = [tuned("bytes256", "gla+silu4", 0, 1.5) | ({"variant": name} if name else {}) for name in variants]
    rows = cells(report.tables(runs)["bytes"])[2:]
    assert [row[0] for row in rows] == [f"gla + silu4{report.comma(name or '')}" for name in variants]
    # rates are compared of what the tasks have
    assert report.tables(runs)["rates"] == report.tables(runs[:1])["rates"]


@pytest.mark.parametrize("text", ["prose", "plays"])
def test_a_text_has_a_table_of_its_own(text):
    page = report.with_tables(PAGE, [tuned(f"{text}1024", "softmax+silu4", 0, 1.5, optimizer="muon")])
    _, table = page.split(f"<!-- table {text} -->")
    head, _, row = cells(table.split("<!-- end -->")[0].strip())
    assert head[3:] == [
        f"bytes of {text}, 256 at a time",
        "rate, warm-up",
        f"bytes of {text}, 1,024 at a time",
        "rate, warm-up",
    ]
    assert row[3:] == ["", "", "1.500 (900)", "0.002, 100"] and page.count("old") == len(NAMES) - 1


def test_a_row_has_the_runs_of_the_rate_that_is_best_with_the_first_seed():
    runs = [
        tuned("bytes256", "softmax+silu4", 0, 1.5, lr=1e-3),
        tuned("bytes256", "softmax+silu4", 0, 1.4, lr=2e-3, warmup=30),
        # the second seed of the best, and a lower one of another
        tuned("bytes256", "softmax+silu4", 1, 1.6, lr=2e-3, warmup=30),
        tuned("bytes256", "softmax+silu4", 1, 1.3, lr=1e-3),
        # one seed is less than two
        tuned("bytes256", "softmax+silu4", 0, 1.2, lr=3e-3),
        # a run with the other optimizer is in a row of its own
        tuned("bytes256", "softmax+silu4", 0, 1.1, optimizer="muon"),
    ]
    (*_, adamw, muon) = cells(report.tuned_table(library.TASKS, runs))
    assert adamw[3:5] == ["1.400 (900) / 1.600 (900)", "0.002, 30"] and muon[3] == "1.100 (900)"
    # a run that has its own number of steps is not compared with those of equal time
    short = tuned("bytes256", "softmax+silu4", 0, 1.0, steps=400)
    assert report.tuned_table(library.TASKS, [*runs, short]) == report.tuned_table(library.TASKS, runs)


def test_rates_are_compared_after_equal_steps():
    runs = [
        tuned("bytes1024", "softmax+silu4", 0, 1.9, steps=400),
        tuned("bytes256", "hybrid+silu4", 0, 1.5, steps=400, lr=1e-3, optimizer="muon"),
        tuned("bytes256", "hybrid+silu4", 0, 1.4, steps=400, lr=2e-3, optimizer="muon"),
        tuned("bytes256", "hybrid+silu4", 0, 1.3, steps=400, lr=2e-3, optimizer="muon", warmup=30),
        tuned("bytes256", "hybrid+silu4", 1, 1.2, steps=400, lr=2e-3, optimizer="muon"),
        # of equal time
        tuned("bytes256", "hybrid+silu4", 0, 1.1, lr=3e-3, optimizer="muon"),
    ]
    head, _, *rows = cells(report.rates_table(library.TASKS, runs))
    assert head == ["task", "steps", "method", "optimizer", "warm-up", "0.001", "0.002"]
    first = ["bytes, 256 at a time", "400", "hybrid + silu4", "muon"]
    assert rows == [
        [*first, "30", "", "1.300"],
        [*first, "100", "1.500", "1.400"],
        ["bytes, 1,024 at a time", "400", "softmax + silu4", "adamw", "100", "", "1.900"],
    ]


def scaling(kind, bits, seed=0):
    """Runs of a method with sizes of which each has ten times the weights of the one before, and takes twice as long"""
    for i, (width, x) in enumerate(zip(library.WIDTHS, bits, strict=False)):
        run = fake("scaling", f"{kind}:{width}", seed, []) | {"bits": x, "parameters": 10**i}
        yield run | {"curve": [{"step": 300, "seconds": 2.0**i, "bits": x}]}


def test_scaling_says_what_a_fit_says(tmp_path):
    # ten times the weights have half of the bits, which is 0.301 in the logarithm
    runs = [*scaling("hybrid", (4.0, 2.0, 1.0)), *scaling("softmax", (4.0, 2.0, 1.5))]
    head, _, softmax, hybrid = cells(report.scaling_table(runs))
    assert head[1] == "64 channels" and head[-2:] == ["exponent, weights", "exponent, processor time of training"]
    assert hybrid == ["hybrid", "4.000 (1 s)", "2.000 (2 s)", "1.000 (4 s)", "", "", "0.301 (0.000)", "1.000 (0.000)"]
    exponent, deviation = softmax[-2].split()
    assert 0.2 < float(exponent) < 0.22 and 0.2 < float(deviation.strip("()")) < 0.4
    law = report.PowerLaw.fit([(1, 4.0), (10, 2.0), (100, 1.0)])
    assert law(1000) == pytest.approx(0.5)
    report.pictures()["scaling"](runs, tmp_path / "scaling.svg")
    shown = (tmp_path / "scaling.svg").read_text()
    assert ">hybrid<" in shown and ">softmax<" in shown and "gated" not in shown
    # another rate is not in the table
    other = next(scaling("hybrid", (3.0,))) | {"lr": 0.5}
    page = report.with_tables(PAGE, [*runs, other])
    assert page == report.with_tables(PAGE, runs) and "4.000 (1 s)" in page
    assert page.count("| hybrid |") == 1 and page.count("old") == len(NAMES) - 1
    # a second seed stands beside the first, with a fit of its own
    *_, both = cells(report.scaling_table([*runs, *scaling("hybrid", (4.0, 1.0), seed=1)]))
    assert both[1:4] == ["4.000 / 4.000 (1 / 1 s)", "2.000 / 1.000 (2 / 2 s)", "1.000 (4 s)"]
    assert both[-2] == "0.301 / 0.602 (0.000 / 0.000)"


def test_sizes_have_a_column_for_each_time():
    runs = [
        fake(f"minutes{minutes}", f"hybrid:{width}", 0, []) | {"curve": [{"step": 900, "bits": bits}]}
        for minutes, width, bits in ((2, 128, 2.5), (10, 128, 2.25), (10, 64, 2.4))
    ]
    head, _, *rows = cells(report.joint_table(report.TOGETHER["sizes"], runs))
    assert head[2:] == ["2 minutes", "10 minutes", "60 minutes"]
    assert [[row[0], *row[2:]] for row in rows] == [
        ["hybrid:128", "2.500 (900)", "2.250 (900)", ""],
        ["hybrid:64", "", "2.400 (900)", ""],
    ]
    assert report.with_tables(PAGE, runs).count("old") == len(NAMES) - 1


def test_runs_with_another_optimizer_are_in_a_table_of_their_own():
    other = fake("recall64", "elu", 0, [0.7] * 10) | {"optimizer": "muon"}
    runs = [fake("recall64", "elu", seed, [x] * 10) for seed, x in ((1, 0.4), (0, 0.5))] + [other]
    page = report.with_tables(PAGE, [*runs, fake("recall64", "relu", 0, [0.3] * 10)])
    assert page.count("70.0 %") == 1 and page.count("| 50.0 % / 40.0 % |") == 2
    *_, row = cells(report.optimizers_table(run.TASKS["recall64"], runs))
    assert row == ["elu", "4,288", "50.0 % / 40.0 %", "70.0 %"]
    # each optimizer has its best learning rate
    better = fake("recall64", "elu", 0, [0.9] * 10) | {"optimizer": "muon", "lr": 0.5}
    *_, row = cells(report.optimizers_table(run.TASKS["recall64"], [*runs, better]))
    assert row == ["elu", "4,288", "50.0 % / 40.0 %", "90.0 %"]
    # a variant has a row of its own
    variant = [each | {"variant": "unit_keys"} for each in (fake("recall64", "elu", 0, [0.2] * 10), other)]
    *_, row, changed = cells(report.optimizers_table(run.TASKS["recall64"], [*runs, *variant]))
    assert row == ["elu", "4,288", "50.0 % / 40.0 %", "70.0 %"]
    assert changed == ["elu, unit_keys", "4,288", "20.0 %", "70.0 %"]
    shown, plain = report.tables([*runs, *variant]), report.tables(runs)
    assert shown.pop("variants") and [name for name in plain if shown[name] != plain[name]] == ["recall64-optimizers"]
    # runs with another number of steps are in no table
    longer = [each | {"steps": 9_000, "seed": 2} for each in runs]
    assert report.with_tables(PAGE, [*runs, *longer]) == report.with_tables(PAGE, runs)


def test_variants_are_beside_what_they_change_and_nowhere_else():
    """After as many steps, with the same rate."""
    chosen = {"steps": 400, "optimizer": "muon", "lr": 5e-3}
    ours = [
        tuned("bytes256", "gla+silu4", 1, 1.2, **chosen),
        tuned("bytes256", "gla+silu4", 0, 1.1, **chosen),
        tuned("bytes256", "gla+silu4", 1, 1.4, **chosen, variant="unit_keys"),
        tuned("bytes256", "gla+silu4", 0, 1.3, **chosen, variant="unit_keys"),
        tuned("bytes256", "local+elu+silu4", 0, 1.9, **chosen, variant="zero_outputs"),
        tuned("bytes256", "local+elu+convolution", 0, 2.1, **chosen, variant="zero_outputs"),
        tuned("bytes256", "local+silu4", 0, 2.2, **chosen, variant="zero_outputs"),
        fake("haystack", "gla+silu", 0, [0.5]) | {"variant": "zero_outputs"},
        fake("haystack", "gla+silu", 0, [0.4]),
    ]
    for record in ours[-2:]:
        record["curve"][0] |= {f"accuracy_{length}": record["curve"][0]["accuracy"] for length in haystack.LENGTHS}
    # a run of today says more than one of before
    ours[2]["curve"][-1]["saved"] = 0.25
    others = [
        tuned("bytes256", "gla+silu4", 0, 1.5, **chosen | {"lr": 1e-2}),
        tuned("bytes256", "ssd+silu4", 0, 1.6, **chosen),
        fake("haystack", "gla+silu", 1, [0.3]) | {"steps": 5},
        tuned("bytes256", "gla+silu4", 0, 1.7, **chosen | {"steps": 800}),
        tuned("bytes256", "gla+silu4", 0, 1.8, **chosen | {"steps": 800}, variant="unit_keys"),
    ]
    head, _, *rows = cells(report.variants_table([*ours, *others]))
    assert head[:4] == ["method", "changed", "bits per byte", "read again, saved"] and len(head) == 8
    assert rows == [
        ["local + elu + convolution", "zero_outputs", "2.100", *[""] * 5],
        ["local", "zero_outputs", "2.200", *[""] * 5],
        ["gla", "", "1.100 / 1.200", "", *["40.0 %"] * 4],
        ["gla", "unit_keys", "1.300 / 1.400", "0.250", *[""] * 4],
        ["gla", "zero_outputs", "", "", *["50.0 %"] * 4],
        ["local + elu", "zero_outputs", "1.900", "", *[""] * 4],
    ]
    shown = report.tables([*ours, *others])
    assert shown["variants"] == report.variants_table([*ours, *others])
    plain = [record for record in [*ours, *others] if "variant" not in record]
    assert shown == report.tables(plain) | {"variants": shown["variants"]}


def test_a_line_joins_the_sizes_of_a_method(tmp_path, monkeypatch):
    lines, path = [], tmp_path / "states.svg"
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, *, label, **options: lines.append((label, x, y)))
    monkeypatch.setattr(points, "_save", lambda *arguments: None)
    figures = {"elu": 0.5, "elu:32": 0.25, "elu+silu:32": 0.75}
    records = [fake("recall", method, 0, [x]) | {"accuracy": x} for method, x in figures.items()]
    points.draw_states([run.TASKS["recall"]], report.state_size, [*records, *RUNS], path)
    assert lines == [("elu", (2208, 4288), (25, 50)), ("_", (2208,), (75,)), ("hollow: with SiLU", [], [])]


def test_pictures_of_places_name_their_methods(tmp_path):
    record = fake("parity", "elu", 0, [0.5])
    record["curve"][0] |= {f"accuracy_{end}": 0.5 for end in range(16, 129, 16)}
    path = tmp_path / "places.svg"
    tasks = [run.TASKS["parity"], run.TASKS["permutations"]]
    points.draw_places(tasks, [record, *RUNS], path, trained=32)
    shown = path.read_text()
    assert ">elu<" in shown and ">softmax<" not in shown and "parity of bits" in shown
    # a task that was not run has no panel
    assert "permutations" not in shown


def test_the_haystack_has_a_column_and_a_place_for_each_length(tmp_path):
    record = fake("haystack", "elu+silu", 0, [0.25])
    record["curve"][0] |= {"accuracy_256": 1.0, "accuracy_1024": 0.75, "accuracy_4096": 0.5, "accuracy_16384": 0.25}
    head, _, row = cells(report.joint_table(report.TOGETHER["haystack"], [record]))
    assert head[2:] == ["256 tokens", "1,024 tokens", "4,096 tokens", "16,384 tokens"]
    assert row == ["elu + silu", "4,288", "100.0 %", "75.0 %", "50.0 %", "25.0 %"]
    path = tmp_path / "haystack.svg"
    report.pictures()["haystack"]([record, *RUNS], path)
    shown = path.read_text()
    assert all(f">{text}<" in shown for text in ("elu + silu", "256", "1,024", "4,096", "16,384"))


def test_only_pictures_that_the_page_shows_are_drawn(tmp_path):
    page, runs = tmp_path / "page.md", tmp_path / "runs.jsonl"
    page.write_text(PAGE + "\n![](page-copying.svg)")
    runs.write_text("".join(json.dumps(record) + "\n" for record in RUNS))
    report.main([str(runs), str(page)])
    assert [path.name for path in tmp_path.glob("*.svg")] == ["page-copying.svg"]
    assert "| 1.888 |" in page.read_text()


def test_no_picture_shows_a_variant_or_other_settings(tmp_path, monkeypatch):
    page, runs, shown = tmp_path / "page.md", tmp_path / "runs.jsonl", []
    others = [RUNS[0] | {"variant": "zero_outputs"}, RUNS[0] | {"lr": 0.5}, RUNS[0] | {"steps": 7}]
    page.write_text(PAGE + "\n![](page-copying.svg)")
    runs.write_text("".join(json.dumps(record) + "\n" for record in [*others, *RUNS]))
    monkeypatch.setattr(report, "pictures", lambda: {"copying": lambda given, path: shown.extend(given)})
    report.main([str(runs), str(page)])
    assert shown == RUNS


def test_a_page_has_its_letters_whatever_the_system_would_read(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    page, runs = tmp_path / "page.md", tmp_path / "runs.jsonl"
    page.write_text(f"φ(x)\n{PAGE}", "utf-8")
    runs.write_text("".join(json.dumps(record) + "\n" for record in RUNS))
    report.main([str(runs), str(page)])
    assert page.read_text("utf-8").startswith("φ(x)\n")
