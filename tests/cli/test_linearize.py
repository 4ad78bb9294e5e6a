"""`linattn linearize`: a folder that transformers loads, a report, refusals, and going on after an interruption."""

import contextlib
import inspect
import json
import math
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTModel,
)

from linattn.cli.main import main, make_parser
from linattn.console.errors import CommandError
from linattn.integrations.transformers import LinattnForCausalLM
from linattn.linearize import linearized_layers, plan, training
from linattn.linearize.command import result, run
from linattn.linearize.command.budget import budget_note
from linattn.linearize.command.text import TrainingBatches
from linattn.models import LanguageModel, LanguageModelConfig
from tests.cli.conftest import sentences
from tests.cli.test_trackers import options_of_trackers, register
from tests.processes import needs_processes, run_in_another

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
# the window leaves linear attention something to do in so short a context
SHORT = ("--steps", "4", "--context", "64", "--window", "8", "--batch", "2", "--method", "elu")
SHORT += ("--save-every", "1", "--lr", "1e-3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of bytes."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=256, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, **SIZE)
    ).save_pretrained(folder)
    return folder


def linearize(model: Path, text: Path, out: Path, *options: str) -> int:
    return main(["linearize", str(model), "--data", str(text), "--out", str(out), *SHORT, *options])


def again(out: Path, *options: str) -> int:
    return main(["linearize", "--report", str(out), *options])


@pytest.fixture(scope="module")
def done(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "linear"
    with pytest.MonkeyPatch.context() as patch:
        events = register(patch)
        assert linearize(model, text, out, "--keep", "1/2", "--track", "tensorboard", "--track", "recorder") == 0
    (out.parent / "events.json").write_text(json.dumps(events))
    short = json.loads((out / "report.json").read_text("utf-8"))
    # a fifth of the time of four steps is too short for all of it
    assert short["scores"] and short["left_out"]
    assert again(out) == 0
    return out


def test_the_folder_loads_and_generates_in_constant_memory(done):
    model = AutoModelForCausalLM.from_pretrained(done, trust_remote_code=True)
    assert len(linearized_layers(model)) == 1
    output = model.generate(torch.tensor([list(b"the cat ")]), max_new_tokens=5, do_sample=False)
    assert output.shape[1] <= 13
    assert not done.with_name("linear.unfinished").exists()


def test_trackers_get_the_losses_of_both_stages(done):
    """The steps of the second stage follow those of the first; TensorBoard's files come into the folder."""
    _, (_, settings), *logged, end = json.loads((done.parent / "events.json").read_text())
    losses = json.loads((done / "report.json").read_text())["losses"]
    assert settings["method"] == "elu" and end[0] == "finish"
    assert [step for step, _ in logged] == [1, 2, 3, 4]
    assert [values["transfer_loss"] for _, values in logged[:1]] == losses["transfer"]
    assert [values["fine-tune_loss"] for _, values in logged[1:]] == losses["fine-tune"]
    assert all(values["tokens_per_second"] > 0 for _, values in logged)
    validated = [{name for name in values if "held_out" in name} for _, values in logged]
    last = {"fine-tune_held_out_loss", "fine-tune_held_out_kl", "fine-tune_held_out_cosine"}
    assert validated == [{"transfer_held_out_error"}, last, last, last]
    (file,) = (done / "tensorboard").glob("events.*")
    assert b"transfer_loss" in file.read_bytes()


def test_the_report_has_everything_and_says_it(done):
    made = json.loads((done / "report.json").read_text("utf-8"))
    rows = ["teacher", "swapped in", "linear", "window alone", "linear part off", "uniform attention"]
    assert list(made["scores"]) == rows
    assert [each["length"] for each in made["recall"]] == [64] and len(made["costs"]) == 1
    assert made["left_out"] == []
    assert made["scores"]["teacher"]["kl"] == 0 and made["scores"]["teacher"]["agreement"] == 1
    assert len(made["kept"]) == 1 and set(made["divergence_with_one_restored"]) == {"0", "1"}
    assert [each["error"] is None for each in made["layers"]].count(True) == 1
    assert [len(losses) for losses in made["losses"].values()] == [1, 3]
    page = (done / "report.html").read_text("utf-8")
    assert page.index(made["sentences"][0].partition("'")[0]) < page.index("<code>")
    assert len(made["samples"]) == 2 and {"prompt", "teacher", "linear"} == made["samples"][0].keys()
    for words in (
        "what it writes",
        "window alone",
        "linear part off",
        "uniform attention",
        "the linear part",
        "entropy",
        *made["sentences"],
    ):
        assert words.lower() in page.lower().replace("&#39;", "'"), words
    assert page.count("<svg ") == 6 and "<script" not in page


def test_files_have_the_mode_of_new_files(finished, done, tmp_path):
    """safetensors makes its files readable for their owner alone, so that nobody else could load the model."""
    model = LanguageModel(LanguageModelConfig(vocab_size=5, dim=8, depth=1, num_heads=2))
    model.save(tmp_path / "saved")
    LinattnForCausalLM.of(model).save_pretrained(tmp_path / "pretrained")
    (tmp_path / "new").touch()
    mode = (tmp_path / "new").stat().st_mode
    for folder in (finished, done, tmp_path):
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert not [file for file in files if file.stat().st_mode != mode]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device without space")
def test_a_full_disk_is_one_sentence():
    with pytest.raises(OSError, match=r"a checkpoint could not be written to /dev, which has [\d,]+ bytes free"):
        training._save({"weights": torch.zeros(100_000)}, Path("/dev/full"))


def test_a_full_disk_at_the_end_leaves_nothing(done, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    model = AutoModelForCausalLM.from_pretrained(done, trust_remote_code=True)
    monkeypatch.setattr(type(model), "save_pretrained", fail)
    with pytest.raises(CommandError, match=r"linear could not be written: .* No space left"):
        result.write_model(tmp_path / "linear", model, None, {})
    assert not list(tmp_path.iterdir())


def test_an_interrupted_conversion_goes_on_and_ends_the_same(model, text, done, tmp_path, monkeypatch, capsys):
    out, work = tmp_path / "linear", tmp_path / "linear.unfinished"

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "choose_layers", interrupt)
        assert linearize(model, text, out, "--keep", "1/2") == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert work.exists() and not out.exists()
    assert linearize(model, text, out, "--keep", "1/4") == 2
    assert "begun with another keep" in capsys.readouterr().err
    checkpoint = work / "transfer" / "checkpoint.pt"
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: len(content) // 2])
    assert linearize(model, text, out, "--keep", "1/2") == 2
    assert f"{checkpoint} is no checkpoint, or a damaged one" in capsys.readouterr().err
    checkpoint.write_bytes(content)
    assert linearize(model, text, out, "--keep", "1/2") == 0
    assert not work.exists()
    assert (out / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()


def linearize_until(fatal: str, number: int, *arguments: Any) -> None:
    """Linearize, and die as by `kill -9` before a file or folder of the fatal name appears for so many times."""
    seen = 0

    def killing(rename: Any) -> Any:
        def rename_or_die(source: Any, target: Any) -> None:
            nonlocal seen
            seen += Path(target).name == fatal
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        return rename_or_die

    torch.set_num_threads(1)
    os.rename, os.replace = killing(os.rename), killing(os.replace)
    linearize(*arguments)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_a_conversion_killed_again_and_again_has_the_same_weights(model, text, done, tmp_path):
    """In the second step of fine-tuning, before OUT has its name, and before the trackers' files come there. The model
    is there before them and the report; the same command, or --report, makes the report."""
    out, work = tmp_path / "linear", tmp_path / "linear.unfinished"
    given = model, text, out, "--keep", "1/2", "--track", "tensorboard"
    weights = (done / "model.safetensors").read_bytes()
    assert not json.loads((done / "conversion.json").read_text("utf-8"))["reset"]
    for fatal, number in (("checkpoint.pt", 3), ("linear", 1), ("tensorboard", 1)):
        assert not out.exists()
        assert run_in_another(linearize_until, fatal, number, *given) == -signal.SIGKILL
    assert (out / "model.safetensors").read_bytes() == weights and not (out / "report.json").exists()
    assert linearize(model, text, out, "--keep", "1/4") == 2
    assert run_in_another(linearize_until, "report.json", 1, *given) == -signal.SIGKILL
    # the first and the second attempt have trained
    assert len([*(out / "tensorboard").glob("events.*")]) >= 2
    assert not work.exists() and (out / "report.html").exists() and not (out / "report.json").exists()
    assert again(out) == 0
    assert (out / "model.safetensors").read_bytes() == weights
    found, expected = (json.loads((folder / "report.json").read_text("utf-8")) for folder in (out, done))
    assert found["scores"]["swapped in"] == expected["scores"]["swapped in"]
    assert found["losses"] == expected["losses"] and found["kept"] == expected["kept"]
    assert found["plan"] == expected["plan"]


def linearize_as(rank: int, attempt: str, killed: int | None, *arguments: Any) -> None:
    """Linearize as one of two processes that torchrun has started; the `killed` one dies in fine-tuning."""
    torch.set_num_threads(1)
    here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""} | here
    dist.init_process_group("gloo", init_method=f"file://{attempt}-meeting", rank=rank, world_size=2)
    read = TrainingBatches.__getitem__

    def read_or_die(self: Any, index: int) -> Any:
        if rank == killed and Path(f"{arguments[2]}.unfinished", "fine-tune", "checkpoint.pt").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, index)

    TrainingBatches.__getitem__ = read_or_die
    with open(f"{attempt}-report-{rank}", "w") as report, contextlib.redirect_stderr(report):
        status = linearize(*arguments)
        report.flush()
        sys.exit(status)


def in_two(folder: Path, killed: int | None, *arguments: Any) -> tuple[list[int | None], list[str]]:
    """Return how two processes end, and the lines that both write."""
    attempt = f"{folder}/{killed}"

    def process(rank: int) -> int | None:
        return run_in_another(linearize_as, rank, attempt, killed, *arguments)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(process, range(2)))
    return ends, [line for rank in range(2) for line in Path(f"{attempt}-report-{rank}").read_text().splitlines()]


@needs_processes
def test_two_processes_linearize_as_one_also_after_one_was_killed(model, text, tmp_path):
    """They go on with shared weights. One of them writes the folder and the report."""
    alone, out = tmp_path / "alone", tmp_path / "linear"
    assert linearize(model, text, alone, "--batch", "4", "--keep", "1/2") == 0
    given = model, text, out, "--keep", "1/2"
    ends, lines = in_two(tmp_path, 1, *given)
    assert ends == [1, -signal.SIGKILL] and not out.exists(), lines
    assert lines[-1].endswith("has ended, and so does this one; the same command goes on"), lines
    assert len([line for line in lines if "another process" in line]) == 1 and "Traceback" not in str(lines)
    ends, lines = in_two(tmp_path, None, *given, "--fsdp")
    assert ends == [0, 0], lines
    assert [line for line in lines if "going on" in line] == [f"going on with {out}.unfinished"]
    assert len([line for line in lines if "is complete" in line]) == 1
    assert not json.loads((out / "conversion.json").read_text("utf-8"))["reset"]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, alone))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    losses, expected = (json.loads((folder / "report.json").read_text("utf-8"))["losses"] for folder in (out, alone))
    for stage in ("transfer", "fine-tune"):
        assert losses[stage] == pytest.approx(expected[stage], rel=1e-4)
    validations = json.loads((out / "report.json").read_text("utf-8"))["validations"]
    assert {stage: list(steps) for stage, steps in validations.items()} == {"transfer": ["1"], "fine-tune": [*"123"]}


def test_a_report_is_made_again_where_the_teacher_and_the_data_have_moved(model, text, done, tmp_path, capsys):
    out = shutil.copytree(done, tmp_path / "linear")
    # a process that was killed after it had written the model leaves its folder
    work = tmp_path / "linear.unfinished"
    (work / "tracks" / "linear").mkdir(parents=True)
    (work / "tracks" / "linear" / "events").write_text("", encoding="utf-8")
    moved = [str(shutil.copytree(folder, tmp_path / folder.name)) for folder in (model, text)]
    record = json.loads((out / "conversion.json").read_text("utf-8"))
    record["settings"] |= {"model": "/nowhere", "data": ["/nowhere"]}
    (out / "conversion.json").write_text(json.dumps(record), encoding="utf-8")
    assert again(out) == 2
    assert "/nowhere cannot be loaded from the Hub, and there is no such folder here" in capsys.readouterr().err
    assert main(["linearize", moved[0], "--data", moved[1], "--report", str(out)]) == 0
    assert (out / "events").exists() and not work.exists()
    found, expected = (json.loads((folder / "report.json").read_text("utf-8")) for folder in (out, done))
    assert found["scores"] == expected["scores"]
    assert (out / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()
    assert again(out, "--steps", "3", "--lora", "2") == 2
    assert "without --steps, --lora" in capsys.readouterr().err
    assert again(model) == 2
    assert "has no conversion.json" in capsys.readouterr().err
    before = (out / "report.json").read_bytes()
    deeper = LlamaConfig(vocab_size=256, max_position_embeddings=256, **{**SIZE, "num_hidden_layers": 3})
    LlamaForCausalLM(deeper).save_pretrained(tmp_path / "deeper")
    assert main(["linearize", str(tmp_path / "deeper"), "--data", moved[1], "--report", str(out)]) == 2
    assert f"{out} was not made from {tmp_path / 'deeper'}" in capsys.readouterr().err
    assert (out / "report.json").read_bytes() == before
    for damaged, message in (("[]", "it holds no object"), ("{}", "it has no settings, plan"), ("{", "is corrupt")):
        (out / "conversion.json").write_text(damaged, encoding="utf-8")
        assert again(out) == 2
        assert message in capsys.readouterr().err


def test_a_report_finds_data_for_validation_from_another_folder_and_where_they_have_moved(
    model, text, tmp_path, monkeypatch
):
    texts = [shutil.copytree(text, tmp_path / name) for name in ("texts", "others")]
    monkeypatch.chdir(tmp_path)
    assert linearize(model, Path("texts"), Path("linear"), "--validation-data", "others") == 0
    out = tmp_path / "linear"
    monkeypatch.chdir(Path(__file__).parent)
    assert again(out) == 0
    scores = json.loads((out / "report.json").read_text("utf-8"))["scores"]
    shutil.move(texts[1], tmp_path / "moved")
    assert again(out) == 2
    assert again(out, "--validation-data", str(tmp_path / "moved")) == 0
    assert json.loads((out / "report.json").read_text("utf-8"))["scores"] == scores


def test_what_is_missing_is_named(capsys):
    assert main(["linearize", "--data", "texts"]) == 2
    assert "MODEL, --out must be given, or --report OUT" in capsys.readouterr().err


def test_a_conversion_on_rows_goes_on_with_the_same_batches(model, tmp_path, monkeypatch):
    """Documents in rows, packed into windows of several; broken off in the middle of fine-tuning. Its tracker goes on,
    too."""
    rows, outs = tmp_path / "rows.jsonl", [tmp_path / "whole", tmp_path / "broken"]
    events, steps = register(monkeypatch), options_of_trackers(monkeypatch, run, "step")
    rows.write_text("".join(json.dumps({"text": line}) + "\n" for line in sentences(200).splitlines()))
    assert linearize(model, rows, outs[0]) == 0
    read, batches = TrainingBatches.__getitem__, []

    def read_or_stop(self, index):
        if len(batches) == 10:
            raise KeyboardInterrupt
        batches.append(read(self, index))
        return batches[-1]

    with monkeypatch.context() as patch:
        patch.setattr(TrainingBatches, "__getitem__", read_or_stop)
        assert linearize(model, rows, outs[1], "--track", "recorder") == 130
    assert any("position_ids" in batch for batch in batches)
    assert linearize(model, rows, outs[1], "--track", "recorder") == 0
    assert [step for step, _ in events if step != "finish"] == ["start", "settings", 1, 2, "start", 3, 4]
    assert steps == [0, 0, 2]
    weights = [(out / "model.safetensors").read_bytes() for out in outs]
    assert weights[0] == weights[1]


def test_a_seed_makes_the_new_weights(model, text, tmp_path, monkeypatch):
    """Also when a conversion resumes, which may return to the weights before its training."""
    initial = []

    def interrupt(conversion, *_):
        initial.append({name: x.tolist() for name, x in conversion.initial.items()})
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_train", interrupt)
    for out, seed in (("first", "1"), ("first", "1"), ("second", "2")):
        assert linearize(model, text, tmp_path / out, "--method", "gla", "--seed", seed) == 130
    assert initial[0] == initial[1] != initial[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep", "7"), r"keep has \[7\]"),
        (("--keep", "3/4"), "--keep 3/4 of 2 layers leaves none that becomes linear"),
        (("--minutes", "1"), "--minutes or --steps"),
        (("--context", "100000"), "--context 100,000 is longer than the 256 tokens"),
        (("--include", "b.txt", "--context", "256"), "too short"),
        (("--batch", "100000000"), r"needs at least .* the activations of 100,000,000 × 64 tokens; a lower --batch"),
        (("--context", "257"), "--context 257 is longer than the 256 tokens"),
    ],
)
def test_a_refused_command_leaves_nothing(model, text, tmp_path, capsys, options, message):
    import re

    assert linearize(model, text, tmp_path / "linear", *options) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_keep_is_a_share_or_numbers(model, text, tmp_path, capsys):
    with pytest.raises(SystemExit):
        linearize(model, text, tmp_path / "linear", "--keep", "3/2")
    assert "a share such as 1/4" in capsys.readouterr().err


def test_a_folder_is_not_overwritten(model, text, done, capsys):
    assert linearize(model, text, done) == 2
    assert "exists already" in capsys.readouterr().err


def test_models_of_other_inputs_are_refused(text, tmp_path, capsys):
    ViTModel(ViTConfig(image_size=12, patch_size=4, **SIZE)).save_pretrained(tmp_path / "vit")
    assert linearize(tmp_path / "vit", text, tmp_path / "linear") == 2
    assert "ViTModel" in capsys.readouterr().err


SIZES = {"vocab_size": 256, "max_position_embeddings": 64, **SIZE}
UNFIT = {
    "no one output": (BertForQuestionAnswering, SIZES, "puts out start_logits, end_logits"),
    "several rows": (BertForMultipleChoice, SIZES, "cannot be linearized"),
    "too few tokens": (LlamaForCausalLM, {**SIZES, "vocab_size": 255}, "its 255 tokens are too few for bytes"),
}


@pytest.mark.parametrize("case", UNFIT.values(), ids=UNFIT)
def test_unfit_models_are_refused_before_any_work(text, tmp_path, capsys, case):
    kind, sizes, message = case
    kind(kind.config_class(**sizes)).save_pretrained(tmp_path / "model")
    assert linearize(tmp_path / "model", text, tmp_path / "linear") == 2
    assert message in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_damaged_and_linearized_folders_are_refused(model, text, done, finished, tmp_path, capsys):
    def refusal(folder: Path, **contents: bytes) -> str:
        if contents:
            shutil.copytree(model, folder)
        for name, content in contents.items():
            (folder / f"{name}.{'json' if name == 'tokenizer' else 'safetensors'}").write_bytes(content)
        assert linearize(folder, text, tmp_path / "linear") == 2
        return capsys.readouterr().err

    assert "linear is linearized already" in refusal(done)
    assert "finished is a model of linattn, whose attention is local+elu: it is linear already" in refusal(finished)
    assert "cannot be loaded: Error while deserializing header" in refusal(tmp_path / "short", model=b"\0" * 100)
    assert "the tokenizer of" in refusal(tmp_path / "tokenizer", tokenizer=b"{}")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"cat": 256, "?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    larger = refusal(tmp_path / "larger", tokenizer=words.to_str().encode())
    assert "the tokenizer has a token 256, but the model has only 256 tokens" in larger


def test_a_conversion_that_diverges_ends_in_one_line(model, text, tmp_path, capsys):
    assert linearize(model, text, tmp_path / "linear", "--lr", "1e30") == 1
    assert "not finite" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "linear").exists()


def test_a_masked_language_model_is_scored_by_its_own_loss(text, tmp_path):
    """The words of the text, 15 % of which are hidden."""
    words = sorted({word for line in (text / "a.txt").read_text("utf-8").split(".") for word in line.split()})
    vocabulary = {word: number for number, word in enumerate(["?", "[MASK]", ".", *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "bert"
    PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", unk_token="?").save_pretrained(folder)
    sizes = SIZE | {"vocab_size": len(vocabulary), "max_position_embeddings": 64}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(folder)
    assert linearize(folder, text, tmp_path / "linear") == 0
    made = json.loads((tmp_path / "linear/report.json").read_text("utf-8"))
    assert made["scores"]["teacher"]["loss"] == pytest.approx(math.log2(len(vocabulary)), abs=0.5)
    assert made["scores"]["linear"]["cosine"] > 0 and made["samples"] == []
    page = (tmp_path / "linear/report.html").read_text("utf-8")
    assert "<th>loss</th>" in page and "<th>cosine</th>" in page
    batch = TrainingBatches(np.full(99, 5), context=64, batch=8, seed=0, mask=1)[0]
    hidden = batch["input_ids"] == 1
    assert torch.equal(hidden, batch["labels"] == 5) and 0.1 < hidden.double().mean() < 0.2


def test_an_encoder_has_a_report_too(text, tmp_path):
    folder = tmp_path / "bert"
    BertModel(BertConfig(vocab_size=256, max_position_embeddings=64, **SIZE)).save_pretrained(folder)
    assert linearize(folder, text, tmp_path / "linear") == 0
    made = json.loads((tmp_path / "linear/report.json").read_text("utf-8"))
    assert made["scores"]["linear"]["loss"] is None and made["scores"]["teacher"]["cosine"] == pytest.approx(1)
    assert "cosine" in made["sentences"][0]


def test_options_reach_the_stages(model, text, tmp_path, monkeypatch):
    given: dict[str, object] = {}

    def stop(made, teacher, batches, budget, **options):
        given.update(options, layers=linearized_layers(made), rows=len(batches[0]["input_ids"]), steps=budget.steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "fine_tune", stop)
    options = ("--lr", "1e-4", "--lora", "4", "--keep", "0", "--window", "0", "--convolution", "2", "--batch", "3")
    assert linearize(model, text, tmp_path / "linear", *options) == 130
    (layer,), rates = given.pop("layers").values(), given.pop("rates")
    spec = layer.linear_attention.spec
    assert (spec.index, spec.window, spec.convolution) == (1, 0, 2)
    assert (rates.stock, rates.new) == pytest.approx((1e-4, 2.5e-4))
    assert given == {"lora": 4, "rows": 3, "steps": 3}


def test_the_command_and_the_functions_have_the_same_defaults():
    of_plan = {name: each.default for name, each in inspect.signature(plan).parameters.items()}
    of_command = vars(make_parser().parse_args(["linearize", "model", "--data", "text", "--out", "linear"]))
    shared = of_plan.keys() & of_command.keys() - {"model", "batch"}
    assert len(shared) >= 4 and {name: of_command[name] for name in shared} == {name: of_plan[name] for name in shared}


def test_each_stage_has_a_step_and_both_have_all():
    for total in range(1, 30):
        stages = run._steps("transfer", total), run._steps("fine-tune", total)
        assert min(stages) >= 1 and sum(stages) == max(2, total)


def test_everything_that_saves_memory_at_once(model, text, tmp_path):
    """Losses are within 1 % of those without, and the folder is in bfloat16."""
    plain, saving = tmp_path / "plain", tmp_path / "saving"
    assert linearize(model, text, plain) == 0
    options = ("--dtype", "bfloat16", "--checkpointing", "--batch", "1", "--accumulate", "2")
    assert linearize(model, text, saving, *options) == 0
    first, second = (json.loads((out / "report.json").read_text("utf-8"))["losses"] for out in (plain, saving))
    for stage in ("transfer", "fine-tune"):
        assert second[stage] == pytest.approx(first[stage], rel=0.01)
    weights = AutoModelForCausalLM.from_pretrained(saving, trust_remote_code=True, dtype="auto").parameters()
    assert {weight.dtype for weight in weights} == {torch.bfloat16}


def test_a_model_that_cannot_recompute_is_refused_before_any_work(text, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "bert"
    BertModel(BertConfig(vocab_size=256, max_position_embeddings=64, **SIZE)).save_pretrained(folder)
    monkeypatch.setattr(BertModel, "supports_gradient_checkpointing", False)
    assert linearize(folder, text, tmp_path / "linear", "--checkpointing") == 2
    assert "--checkpointing" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["bert"]


def test_training_that_does_harm_is_undone(model, text, tmp_path, capsys):
    out = tmp_path / "linear"
    assert linearize(model, text, out, "--lr", "1", "--keep", "0") == 0
    made = json.loads((out / "report.json").read_text("utf-8"))
    assert made["scores"]["linear"]["loss"] == pytest.approx(made["scores"]["swapped in"]["loss"], rel=1e-4)
    assert made["sentences"][-1] == "Training did not help, so the model has the weights before it."
    assert "training did not help" in capsys.readouterr().err


def test_a_budget_that_is_too_small_is_announced():
    assert budget_note(10**9, 4_096, 20_000, 10.0, 1.0) is None
    assert budget_note(10**9, 4_096, None, 60 * 24.0, 1.0) is None
    said = budget_note(10**9, 4_096, None, 10.0, 2.0)
    assert said.startswith("the budget is small for 1,000,000,000 weights: it reads about 1,228,800 tokens")
    assert "needs about 50,000,000, and these take about 6:46:54 (hours" in said
    # every conversion needs a hundred updates
    assert "needs about 12,800" in budget_note(10, 128, 99, 10.0, 1.0)
    assert budget_note(10, 128, 100, 10.0, 1.0) is None
