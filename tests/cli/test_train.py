"""A run: what it leaves, what its figures mean, and that it learns."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import linattn
from linattn.cli.checkpoints import last_step
from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from linattn.cli.schedule import Schedule
from linattn.cli.trainer import RunTrainer
from linattn.data.windows import validation_windows
from linattn.models import LanguageModel
from tests.cli.conftest import SHORT, TINY


def log_of(run: Path, name: str) -> list[dict]:
    return [record for record in open_run(run).records() if name in record]


def test_the_folder_holds_what_a_run_is(finished):
    names = sorted(entry.name for entry in finished.iterdir())
    run = ["checkpoints", "curve.png", "data", "log.jsonl", "run.json"]
    model = ["config.json", "generation_config.json", "linattn_classes.py", "model.safetensors"]
    assert names == sorted([*run, *model, "tokenizer.json", "tokenizer_config.json"])
    assert sorted(entry.name for entry in (finished / "checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-8"]
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_description_says_what_was_asked_of_which_data(finished, text):
    description = json.loads((finished / "run.json").read_text())
    assert description["paths"] == [str(text)]
    assert (description["options"]["dim"], description["options"]["steps"]) == (16, 8)
    assert description["versions"]["linattn"] == linattn.__version__
    assert description["finished"] is not None
    size = sum(file.stat().st_size for file in text.iterdir())
    assert sum(part["bytes"] for part in description["data"].values()) == size


def test_the_weights_load_with_and_without_transformers(finished):
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(257, (2, 65))
    ours = LanguageModel.load(finished)(tokens)
    theirs = AutoModelForCausalLM.from_pretrained(finished)(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_weights_are_those_of_the_last_checkpoint(finished):
    assert (finished / "model.safetensors").read_bytes() == (
        finished / "checkpoints" / "checkpoint-8" / "model.safetensors"
    ).read_bytes()


def test_the_log_has_what_curves_are_made_of(finished):
    training, validation = log_of(finished, "training_bits_per_byte"), log_of(finished, "validation_bits_per_byte")
    assert [record["step"] for record in training] == [2, 4, 6, 8]
    assert [record["step"] for record in validation] == [4, 8]
    assert [record["tokens"] for record in training] == [2 * 4 * 31, 4 * 4 * 31, 6 * 4 * 31, 8 * 4 * 31]
    for record in training:
        assert record["tokens_per_second"] > 0 and record["gradient_norm"] > 0 and record["seconds"] > 0


def nats_of_validation(run: Path, context: int, most: int = 10**9) -> tuple[float, int]:
    """By the definition: the logarithm of each predicted token's probability, and how many are predicted."""
    opened, model = open_run(run), LanguageModel.load(run)
    tokens = np.fromfile(run / "data" / "validation.tokens", opened.vocabulary().dtype)
    windows = validation_windows(tokens, context, most=most)
    rows = torch.stack([windows[i]["input_ids"] for i in range(len(windows))])
    with torch.no_grad():
        logits = model(rows)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item(), rows[:, 1:].numel()


def test_bits_per_byte_count_the_bytes_of_the_text(finished):
    nats, predicted = nats_of_validation(finished, context=32)
    part = open_run(finished).description["data"]["validation"]
    record = log_of(finished, "validation_bits_per_byte")[-1]
    bits_per_token = nats / predicted / math.log(2)
    assert record["validation_bits_per_token"] == pytest.approx(bits_per_token, rel=1e-5)
    assert record["validation_bits_per_byte"] == pytest.approx(
        bits_per_token * part["tokens"] / part["bytes"], rel=1e-5
    )


def test_bits_per_byte_do_not_depend_on_what_a_token_is(text, tokenizer, tmp_path):
    """An untrained model gives all tokens the same probability, 1 / 301, and a token is worth several bytes."""
    run = tmp_path / "run"
    arguments = ("--tokenizer", str(tokenizer), "--lr", "1e-9", "--validation-part", "0.3", "--out", str(run))
    assert main(["train", str(text), *TINY, *SHORT, *arguments]) == 0
    part = open_run(run).description["data"]["validation"]
    record = log_of(run, "validation_bits_per_byte")[-1]
    assert part["bytes"] > 2 * part["tokens"]
    assert record["validation_bits_per_token"] == pytest.approx(math.log2(301), abs=0.1)
    nats, predicted = nats_of_validation(run, context=32)
    # all but the first token and the last few, which make no window, are predicted
    assert predicted > 0.8 * part["tokens"]
    total_bits = nats / math.log(2) * part["tokens"] / predicted
    assert record["validation_bits_per_byte"] == pytest.approx(total_bits / part["bytes"], rel=1e-5)


@pytest.mark.parametrize("of_bytes", [True, False])
def test_the_tokenizer_of_a_run_is_the_one_that_it_learned_from(of_bytes, text, tokenizer, tmp_path):
    run, given = tmp_path / "run", () if of_bytes else ("--tokenizer", str(tokenizer))
    assert main(["train", str(text), *TINY, *SHORT, *given, "--validation-part", "0.3", "--out", str(run)]) == 0
    vocabulary, theirs = open_run(run).vocabulary(), AutoTokenizer.from_pretrained(run)
    sample = next(text.iterdir()).read_bytes()[:300].decode("utf-8", "ignore")
    assert theirs(sample, add_special_tokens=False).input_ids == list(vocabulary.encode(sample.encode()))
    assert theirs(sample).input_ids[0] == theirs.eos_token_id == vocabulary.separator == len(theirs) - 1
    model = AutoModelForCausalLM.from_pretrained(run)
    assert model.generation_config.eos_token_id == vocabulary.separator
    assert model.config.vocab_size == vocabulary.size


def test_it_learns(text, tmp_path):
    """Words of a fixed list, in any order: well below the 4.2 bits of its letters' frequencies."""
    run = tmp_path / "run"
    arguments = ("--lr", "1e-2", "--steps", "120", "--evaluate-every", "120", "--dim", "32", "--batch", "8")
    assert main(["train", str(text), *TINY, *SHORT, *arguments, "--out", str(run)]) == 0
    assert log_of(run, "validation_bits_per_byte")[-1]["validation_bits_per_byte"] < 2


def test_any_bytes_are_data(tmp_path):
    (tmp_path / "data").write_bytes(np.random.default_rng(0).bytes(3000))
    assert main(["train", str(tmp_path / "data"), *TINY, *SHORT, "--out", str(tmp_path / "run")]) == 0


def test_the_clock_ends_a_run(text, tmp_path, monkeypatch):
    """Of this clock every step takes 50 ms, on any machine."""
    run, now = tmp_path / "run", 0.0
    monkeypatch.setattr("linattn.cli.schedule.time", SimpleNamespace(monotonic=lambda: now))
    step = Schedule.on_optimizer_step

    def slow_step(self, *arguments, **options):
        nonlocal now
        now += 0.05
        step(self, *arguments, **options)

    monkeypatch.setattr(Schedule, "on_optimizer_step", slow_step)
    limits = ("--minutes", "0.02", "--evaluate-every", "1000000", "--save-every", "1000000", "--log-every", "1")
    short = [value for value in SHORT if value not in ("--steps", "8")]
    assert main(["train", str(text), *TINY, *short, *limits, "--out", str(run)]) == 0
    training = log_of(run, "training_bits_per_byte")
    assert training[-1]["seconds"] == pytest.approx(1.2)
    # the learning rate has risen and come down with the time
    rates = [record["learning_rate"] for record in training]
    assert max(rates) > 0.9e-3 and rates[-1] < 0.1e-3
    last = training[-1]["step"]
    assert log_of(run, "validation_bits_per_byte")[-1]["step"] == last == open_run(run).saved_steps()[-1]


def test_the_bar_shows_bits_per_byte_and_tokens_per_second(text, tmp_path, monkeypatch):
    import io
    import sys

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["train", str(text), *TINY, *SHORT, "--out", str(tmp_path / "run")]) == 0
    bars = [line for line in terminal.getvalue().split("\r") if "%|" in line]
    assert any("training 7." in bar and "bits/byte" in bar and "tokens/s" in bar for bar in bars)
    assert any("validation 7." in bar for bar in bars)
    # elapsed < left
    assert any(re.search(r"\d\d:\d\d<\d\d:\d\d, step \d", bar) for bar in bars)
    lines = terminal.getvalue().replace("\r", "\n").splitlines()
    # lines are for validations only: the bar has the rest
    assert not any(line.endswith(" left") for line in lines)


def test_without_a_terminal_there_are_lines(text, tmp_path, capsys):
    assert main(["train", str(text), *TINY, *SHORT, "--out", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().err.splitlines()
    form = r"step (\d), training 7\.\d+ bits/byte, [\d,]+ tokens/s, \d\d:\d\d left"
    assert [int(match[1]) for line in lines if (match := re.fullmatch(form, line))] == [2, 4, 6, 8]
    assert not any("%|" in line for line in lines)


def test_a_run_can_be_replaced(text, tmp_path):
    run = tmp_path / "run"
    assert main(["train", str(text), *TINY, *SHORT, "--out", str(run)]) == 0
    assert main(["train", str(text), *TINY, *SHORT, "--dim", "32", "--replace", "--out", str(run)]) == 0
    assert LanguageModel.load(run).config.dim == 32
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_tokenizer_that_loses_text_says_so_once(text, tokenizer, tmp_path, capsys):
    """Here all the letters t, of which it makes spaces."""
    description = json.loads(tokenizer.read_text())
    description["normalizer"] = {"type": "Replace", "pattern": {"String": "t"}, "content": " "}
    (tmp_path / "lossy.json").write_text(json.dumps(description))
    content = b"".join(file.read_bytes() for file in text.iterdir())
    share = f"{100 * content.count(b't') / len(content):.2g} %"
    for name, expected in ((tmp_path / "lossy.json", 1), (tokenizer, 0)):
        run = tmp_path / name.stem
        options = ("--tokenizer", str(name), "--validation-part", "0.3", "--steps", "1", "--out", str(run))
        assert main(["train", str(text), *TINY, *SHORT, *options]) == 0
        told = [line for line in capsys.readouterr().err.splitlines() if "cannot give the text back" in line]
        assert len(told) == expected
        assert all(f"lossy.json cannot give the text back: {share} of the bytes are lost" in line for line in told)
        lost = sum(part["lost_bytes"] for part in open_run(run).description["data"].values())
        assert lost == expected * content.count(b"t")


def poison(monkeypatch: pytest.MonkeyPatch, step: int, value: float) -> None:
    """From the gradient of a step on, whatever it was."""
    before = RunTrainer.training_step

    def training_step(self, *arguments, **options):
        loss = before(self, *arguments, **options)
        if self.state.global_step == step - 1:
            next(self.model.parameters()).grad.fill_(value)
        return loss

    monkeypatch.setattr(RunTrainer, "training_step", training_step)


@pytest.mark.parametrize("reports", [("--log-every", "1"), ("--log-every", "100"), ("--evaluate-every", "1")])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_divergence_stops_a_run_and_keeps_the_last_good_checkpoint(text, tmp_path, monkeypatch, capsys, reports, value):
    """However seldom the loss is logged: a checkpoint of bad weights is never written."""
    run = tmp_path / "run"
    poison(monkeypatch, 6, value)
    options = ("--save-every", "2", "--keep", "1", "--evaluate-every", "100", *reports)
    assert main(["train", str(text), *TINY, *SHORT, *options, "--out", str(run)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "training has diverged" in error and "the checkpoint of step 4 is kept" in error
    assert "a lower --lr (it was 0.005) or a smaller --clip (it was 1)" in error
    opened = open_run(run)
    assert opened.saved_steps() == [4] and opened.description["finished"] is None
    assert all(weight.isfinite().all() for weight in LanguageModel.load(run).parameters())
    assert last_step(opened) == 4
    assert [path for path in run.rglob(".*")] == []
    # the log is JSON, which has no NaN
    for line in (run / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_divergence_before_the_first_checkpoint(text, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", str(text), *TINY, *SHORT, "--lr", "1e20", "--clip", "0", "--out", str(run)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "there is no checkpoint yet" in error and "with --clip 1" in error
    assert open_run(run).saved_steps() == []


def test_a_loss_of_validation_may_diverge_too(text, tmp_path, monkeypatch, capsys):
    evaluation_loop = RunTrainer.evaluation_loop

    def overflowing(self, *arguments, **options):
        output = evaluation_loop(self, *arguments, **options)
        output.metrics["eval_loss"] = math.inf
        return output

    monkeypatch.setattr(RunTrainer, "evaluation_loop", overflowing)
    assert main(["train", str(text), *TINY, *SHORT, "--out", str(tmp_path / "run")]) == 1
    assert "the loss is not finite at step 4" in capsys.readouterr().err.splitlines()[-1]
