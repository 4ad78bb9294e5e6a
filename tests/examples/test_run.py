"""The runner: a line a run, and no run twice."""

import json
from dataclasses import replace

import pytest
import torch

from examples.learning import run
from examples.learning.task import IGNORED, Training, answers, loss_and_accuracy
from examples.learning.training import fit, learning_rate, make_optimizer, settings
from linattn import LanguageModel


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("to be or not to be, " * 400)
    return path


@pytest.fixture(autouse=True)
def small_tests(monkeypatch):
    """Train and measure on a few sequences."""
    for module, sequences in (("recall", 10), ("haystack", 2), ("copying", 10), ("tracking", 10), ("library", 4_096)):
        monkeypatch.setattr(f"examples.learning.{module}.TEST", sequences)
    monkeypatch.setattr("examples.learning.recall.BATCH", 8)
    monkeypatch.setattr("examples.learning.haystack.LENGTHS", (32, 128))
    monkeypatch.setattr("examples.learning.library.BATCH", 1_024)
    monkeypatch.setattr("examples.learning.library.PASSAGES", 2)
    monkeypatch.setattr(
        "examples.learning.library.split", lambda text=None: (torch.arange(8_192) % 251, torch.arange(8_192) % 251)
    )
    monkeypatch.setattr("examples.learning.recall.TRAIN", 300)


def cases():
    """A method of each task, and each model of any, but for those that differ in their width alone."""
    every = [(name, method) for name, task in run.TASKS.items() for method in task.methods]
    firsts = {name: (name, next(iter(task.methods))) for name, task in run.TASKS.items()}
    models = {}
    for name, method in reversed(every):
        model = run.TASKS[name].methods[method]
        models[replace(model, dim=128, num_heads=128 * model.num_heads // model.dim)] = name, method
    return sorted({*firsts.values(), *models.values()})


@pytest.mark.parametrize(("task", "method"), cases())
def test_a_step_of_everything(tmp_path, text, task, method):
    threads = torch.get_num_threads()
    out = tmp_path / "runs.jsonl"
    run.main(["--task", task, "--method", method, "--steps", "1", "--data", str(text), "--out", str(out)])
    torch.set_num_threads(threads)
    (record,) = run.read(out)
    assert (record["task"], record["method"], record["seed"], record["steps"]) == (task, method, 0, 1)
    (point,) = record["curve"]
    assert point["step"] == 1 and point[run.TASKS[task].metric] == record[run.TASKS[task].metric]
    # a small step away from the start, where everything is as likely as anything
    start = torch.tensor(float(run.TASKS[task].methods[method].vocab_size)).log()
    assert point["loss"] == pytest.approx(float(start), abs=0.4)


def fake_train(calls):
    def train(task, method, seed, *, variant, data, report):
        calls.append((task.name, method, seed))
        steps, changed = task.training.steps, {"variant": variant} if variant else {}
        return {"task": task.name, "method": method, "seed": seed, "steps": steps, **changed, **settings(task.training)}

    return train


def test_what_the_file_has_is_not_run_again(tmp_path, monkeypatch):
    calls, out = [], tmp_path / "new" / "runs.jsonl"
    monkeypatch.setattr(run, "train", fake_train(calls))
    arguments = ["--task", "copying", "--method", "softmax", "elu", "--out", str(out)]
    run.main([*arguments, "--seed", "0"])
    run.main([*arguments, "--seed", "0", "1"])
    assert calls == [("copying", method, seed) for seed in (0, 1) for method in ("softmax", "elu")]
    # another number of steps is another run
    run.main([*arguments, "--seed", "0", "--steps", "7"])
    assert len(calls) == 6 == len(run.read(out))
    # and so is another learning rate, warm-up or optimizer, each with each
    others = ["--optimizer", "adamw", "muon", "--lr", "1e-3", "0.5", "--warmup", "100", "7"]
    run.main([*arguments, "--seed", "0", *others])
    # the task's own settings were run before
    assert len(calls) == 6 + 2 * (8 - 1) == len(run.read(out))
    run.main([*arguments, "--seed", "0", *others])
    assert len(calls) == 20
    # and a model with one thing changed
    for _ in range(2):
        run.main([*arguments, "--seed", "0", "--variant", "zero_outputs", "unit_keys"])
        assert len(calls) == 24


def test_a_line_that_was_cut_off_counts_as_none_and_is_replaced(tmp_path, monkeypatch):
    calls, out = [], tmp_path / "runs.jsonl"
    monkeypatch.setattr(run, "train", fake_train(calls))
    run.main(["--task", "copying", "--out", str(out)])
    whole = out.read_text()
    out.write_text(whole[:-20])
    run.main(["--task", "copying", "--out", str(out)])
    assert calls[-1] == calls[-2] and len(calls) == 3
    assert out.read_text() == whole and len([json.loads(line) for line in whole.splitlines()]) == 2


@pytest.mark.parametrize("optimizer", ("adamw", "muon"))
def test_every_weight_is_trained_and_matrices_alone_decay(optimizer):
    model = LanguageModel(run.TASKS["bytes256"].methods["hybrid+silu4"])
    training = Training(steps=1, lr=0.5, every=1, optimizer=optimizer)
    groups = make_optimizer(model, training).param_groups
    assert {id(weight) for group in groups for weight in group["params"]} == set(map(id, model.parameters()))
    for group in groups:
        assert group["lr"] == 0.5 and group["weight_decay"] in (0, 0.1)
        assert all((weight.ndim > 1) == (group["weight_decay"] > 0) for weight in group["params"])
    linear = {id(module.weight) for module in model.blocks.modules() if isinstance(module, torch.nn.Linear)}
    matrices = {id(weight) for weight in groups[0]["params"]}
    # the embeddings and convolutions are among the matrices of AdamW
    assert matrices == linear if optimizer == "muon" else matrices > linear


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    training = Training(steps=1000, lr=2.0, every=1)
    rates = [learning_rate(step, training) for step in range(1001)]
    assert rates[0] == pytest.approx(0.02) and max(rates) == rates[99] == pytest.approx(2.0)
    assert rates[1000] == pytest.approx(0.2) and rates[100:] == sorted(rates[100:], reverse=True)


def test_the_learning_rate_may_drop_instead():
    training = Training(steps=1000, lr=2.0, every=1, drop=600)
    rates = [learning_rate(step, training) for step in (99, 100, 599, 600, 999)]
    assert rates == pytest.approx([2, 2, 2, 0.2, 0.2])


def test_the_learning_rate_may_follow_the_time():
    training = Training(steps=1000, seconds=10.0, lr=2.0, every=1)
    rates = [learning_rate(150, training, spent) for spent in (0, 5, 10, 11)]
    # after 50 of the 900 steps beyond the warm-up; half of the cosine; its end
    assert rates == pytest.approx([learning_rate(150, replace(training, seconds=None)), 1.1, 0.2, 0.2])


def test_training_ends_when_its_time_is_over(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("examples.learning.training.time.process_time", lambda: next(clock))
    task = run.TASKS["copying"]
    training = replace(task.training, seconds=7.0, every=3)
    curve = fit(LanguageModel(task.methods["elu"]), task.prepare(0, None), training, report=lambda point: None)
    # each step takes a second of this clock
    assert [(point["step"], point["seconds"]) for point in curve] == [(3, 3), (6, 6), (7, 7)]


def test_loss_and_accuracy_count_what_is_asked_only():
    data = run.TASKS["copying"].prepare(0, None)
    model = LanguageModel(run.TASKS["copying"].methods["softmax"])
    tokens, targets = data.test
    logits, wanted = answers(model, tokens, targets)
    everywhere = model(tokens)
    torch.testing.assert_close(logits, everywhere[targets != IGNORED])
    loss, accuracy = loss_and_accuracy(model, tokens, targets)
    expected = torch.nn.functional.cross_entropy(everywhere.mT, targets, ignore_index=IGNORED)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert accuracy == pytest.approx(float((logits.argmax(-1) == wanted).float().mean()))


def test_what_takes_long_or_a_text_is_run_only_if_it_is_named(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(run, "train", fake_train(calls))
    (tmp_path / "text").touch()
    run.main(["--data", str(tmp_path / "text"), "--out", str(tmp_path / "runs.jsonl")])
    assert {name for name, _, _ in calls} == {
        name for name in run.TASKS if not name.startswith(("prose", "plays", "long", "scaling", "minutes"))
    }
