"""Whatever is wrong with what the user gave: one clear line, exit status 2, and nothing half-written."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from linattn.cli import demo
from linattn.cli.main import main
from linattn.cli.run_folder import open_run
from linattn.cli.trainer import RunTrainer
from linattn.console.atomic import copy_atomically, write_atomically
from linattn.console.errors import CommandError, writing
from tests.cli.conftest import SHORT, TINY


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def fails(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """The one line that the command says."""
    capsys.readouterr()
    try:
        status = main(arguments)
    except SystemExit as exit:
        status = exit.code
    output = capsys.readouterr()
    assert status == 2, output
    (line,) = output.err.splitlines()
    assert line.startswith("linattn")
    return line


@pytest.fixture
def here(tmp_path, monkeypatch, text):
    """A folder with data, where relative names lead."""
    shutil.copytree(text, tmp_path / "text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRAIN = {
    "no data": ((), "DATA is missing"),
    "missing data": (("missing.txt",), "there is no file or folder missing.txt"),
    "empty folder": (("empty",), "there are no files in empty"),
    "empty file": (("nothing.txt",), "there are no training data"),
    "too short": (("short.txt",), "there are 6 tokens of training data, but a context of 32 needs at least 32"),
    "too long a context": (("text", "--context", "100000"), "a context of 100,000 needs at least 100,000"),
    "no validation": (("text", "--validation-part", "0.0001"), "no validation data"),
    "no such names": (("text", "--include", "*.c"), "there are no files that fit --include *.c in text"),
    "missing validation": (("text", "--validation-data", "missing"), "there is no file or folder missing"),
    "two validations": (
        ("text", "--validation-part", "0.5", "--validation-data", "text"),
        "--validation-part is of DATA",
    ),
    "missing tokenizer": (("text", "--tokenizer", "missing.json"), "there is no tokenizer missing.json"),
    "bad tokenizer": (("text", "--tokenizer", "bad.json"), "bad.json is no file of the tokenizers package"),
    "heads": (("text", "--num-heads", "3"), "num_heads must divide dim, or head_dim be given, but they are 3 and 16"),
    "attention": (("text", "--attention", "nonsense"), "nonsense"),
    "no causal form": (("text", "--attention", "linformer"), "no such model: Linformer mixes the whole sequence"),
    "attention of layers": (("text", "--attention", "elu,elu,elu"), "attention names 3 layers, which repeat, so"),
    "dropout": (("text", "--dropout", "1.5"), "dropout"),
    "not a number": (("text", "--steps", "many"), "--steps: must be a whole number of at least 1, but is 'many'"),
    "negative": (("text", "--batch", "-4"), "--batch: must be a whole number of at least 1, but is '-4'"),
    "too many steps": (("text", "--steps", "9" * 19), "39,999,999,999,999,999,996 sequences, but there can be at most"),
    "large seed": (("text", "--seed", "4294967296"), "--seed: must be a whole number of at least 0 and at most"),
    "infinite": (("text", "--lr", "inf"), "--lr: must be a number above 0, but is 'inf'"),
    "nan": (("text", "--warmup", "nan"), "--warmup: must be a number between 0 and 1, but is 'nan'"),
    "choice": (("text", "--norm", "batch"), "--norm: invalid choice: 'batch'"),
    "preset": (("text", "--preset", "gated_delta"), "--preset: invalid choice: 'gated_delta' (choose from"),
    "nearest preset": (("text", "--preset", "deltanets"), "did you mean 'deltanet'?"),
    "unknown option": (("text", "--colour", "red"), "unrecognized arguments: --colour red"),
    "abbreviation": (("text", "--dep", "1"), "unrecognized arguments: --dep 1"),
}


@pytest.mark.parametrize("name", TRAIN)
def test_training_that_cannot_begin_leaves_nothing(here, capsys, name):
    arguments, expected = TRAIN[name]
    before = snapshot(here)
    data = [argument for argument in arguments[:1] if not argument.startswith("-")]
    line = fails(capsys, "train", *data, "--out", "runs/new", *TINY, *SHORT, *arguments[len(data) :])
    assert expected in line
    assert snapshot(here) == before


def test_a_run_is_not_written_over(here, finished, capsys):
    shutil.copytree(finished, "run")
    before = snapshot(here)
    assert "there is a run in run already" in fails(capsys, "train", "text", "--out", "run", *TINY, *SHORT)
    assert "other exists and is no run" in fails(capsys, "train", "text", "--out", "other", "--replace", *TINY)
    for unnamed in (".", "..", "/"):
        wrong = f"--out must end with the name of a folder for the run, but is {unnamed}"
        assert wrong in fails(capsys, "train", "text", "--out", unnamed, *TINY)
    assert "short.txt exists and is no run" in fails(capsys, "train", "text", "--out", "short.txt", *TINY)
    # a run is deleted when the new one is ready, and not before
    assert "too short" in fails(capsys, "train", "short.txt", "--out", "run", "--replace", *TINY, *SHORT)
    assert snapshot(here) == before


@pytest.mark.parametrize("target", ["run", "empty", "missing"])
def test_a_link_is_no_place_for_a_run(here, finished, capsys, target):
    """A new run takes the name of --out, and would leave the folder behind the link without a name."""
    shutil.copytree(finished, "run")
    Path("link").symlink_to(target)
    before = snapshot(here)
    line = fails(capsys, "train", "text", "--out", "link", "--replace", *TINY, *SHORT)
    assert "link is a link: name the folder itself" in line and snapshot(here) == before


def test_a_path_may_be_no_text(here, finished, capsys):
    """Linux takes any bytes as a name. A run has read such data, but cannot have such a name."""
    line = fails(capsys, "train", "text", "--out", os.fsdecode(b"caf\xe9"), *TINY, *SHORT)
    assert "--out must be a path in UTF-8" in line
    shutil.copytree(finished, "run")
    open_run(Path("run")).describe(paths=[os.fsdecode(b"caf\xe9.txt"), "café.txt"])
    assert open_run(Path("run")).description["paths"] == ["caf?.txt", "café.txt"]


def test_only_a_run_goes_on(here, finished, capsys):
    assert "there is no run in missing" in fails(capsys, "train", "--resume", "--out", "missing")
    assert "there is no run in other" in fails(capsys, "train", "--resume", "--out", "other")
    line = fails(capsys, "train", "text", "--resume", "--out", str(finished))
    assert "--resume goes on with the run's own data" in line


@pytest.fixture
def run(here, finished) -> Path:
    shutil.copytree(finished, here / "run")
    return here / "run"


def rewrite(run: Path, **changes: object) -> None:
    description = json.loads((run / "run.json").read_text()) | changes
    (run / "run.json").write_text(json.dumps(description))


READERS = (("generate", "run"), ("info", "run"), ("train", "--resume", "--out", "run"))


@pytest.mark.parametrize("reader", READERS)
def test_a_run_of_another_format_is_refused(run, capsys, reader):
    rewrite(run, format=7, versions={"linattn": "9.1"})
    assert "was written by linattn 9.1 in format 7, but this version reads format 1" in fails(capsys, *reader)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"format": 1}'])
def test_a_corrupt_description_is_told(run, capsys, reader, content):
    (run / "run.json").write_text(content)
    assert "run.json is corrupt" in fails(capsys, *reader)


@pytest.mark.parametrize("reader", READERS[:2])
def test_corrupt_weights_are_told(run, capsys, reader):
    weights = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "run is corrupt" in fails(capsys, *reader)
    (run / "model.safetensors").unlink()
    assert "model.safetensors is missing" in fails(capsys, *reader)


@pytest.mark.parametrize("reader", READERS[:2])
def test_a_model_of_a_later_version_is_refused(run, capsys, reader):
    config = json.loads((run / "config.json").read_text()) | {"linattn_version": "99.0"}
    (run / "config.json").write_text(json.dumps(config))
    assert "was written by linattn 99.0" in fails(capsys, *reader)


def test_unknown_options_of_a_run_are_told(run, capsys):
    rewrite(run, finished=None, options=json.loads((run / "run.json").read_text())["options"] | {"magic": 1})
    assert "options that this version does not know: magic" in fails(capsys, "train", "--resume", "--out", "run")


@pytest.mark.parametrize("content", ["[]", '{"model.safetensors": null}'])
def test_a_damaged_checkpoint_is_told(run, capsys, content):
    rewrite(run, finished=None)
    (run / "checkpoints" / "checkpoint-8" / "files.json").write_text(content)
    line = fails(capsys, "train", "--resume", "--out", "run")
    assert "checkpoint-8 is damaged: files.json has no digests; without it the run goes on from step 4" in line


def test_damaged_data_are_told(run, capsys):
    rewrite(run, finished=None)
    file = run / "data" / "training.tokens"
    file.write_bytes(file.read_bytes()[:-10])
    assert "the data are damaged" in fails(capsys, "train", "--resume", "--out", "run")


GENERATE = {
    "temperature": (("--temperature", "-1"), "--temperature: must be a number of at least 0"),
    "top_k": (("--top-k", "0"), "--top-k: must be a whole number of at least 1"),
    "top_p": (("--top-p", "1.5"), "--top-p: must be a number above 0 and at most 1"),
    "penalty": (("--repetition-penalty", "0"), "--repetition-penalty: must be a number above 0"),
    "tokens": (("--max-new-tokens", "-1"), "--max-new-tokens: must be a whole number of at least 0"),
    "seed": (("--seed", "x"), "--seed: must be a whole number of at least 0"),
    "large seed": (("--seed", str(2**64)), "--seed: must be a whole number of at least 0 and at most 4294967295"),
    # logits that such numbers divide are infinite
    "no temperature": (("--temperature", "1e-300"), "this cannot be generated"),
    "no penalty": (("--prompt", "the", "--repetition-penalty", "1e-300"), "this cannot be generated"),
}


@pytest.mark.parametrize("name", GENERATE)
def test_bad_options_of_generate_are_told(run, capsys, name):
    arguments, expected = GENERATE[name]
    assert expected in fails(capsys, "generate", "run", *arguments)


def test_the_end_of_learned_positions_is_told(here, capsys):
    assert main(["train", "text", "--out", "run", *TINY, *SHORT, "--positions", "learned", "--steps", "1"]) == 0
    line = fails(capsys, "generate", "run", "--max-new-tokens", "100")
    assert "positions end at 32" in line


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_told(run, capsys, value, temperature):
    tensors = load_file(run / "model.safetensors")
    next(iter(tensors.values())).fill_(value)
    save_file(tensors, run / "model.safetensors", metadata={"format": "pt"})
    line = fails(capsys, "generate", "run", "--temperature", temperature)
    assert line == "linattn generate: the weights in run are not finite: their training has diverged"


def test_logits_that_overflow_are_told(run, capsys):
    tensors = load_file(run / "model.safetensors")
    save_file({name: 1e38 * x for name, x in tensors.items()}, run / "model.safetensors", metadata={"format": "pt"})
    assert "this cannot be generated" in fails(capsys, "generate", "run")


def test_a_run_without_weights_says_so(run, capsys):
    for name in ("config.json", "model.safetensors"):
        (run / name).unlink()
    assert "has no weights yet" in fails(capsys, "generate", "run")


@pytest.fixture
def small_files():
    """A disk that is full after so many bytes of a file, as far as a process can tell."""
    resource = pytest.importorskip("resource", reason="Windows has no limits on files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if num_bytes is None else (num_bytes, before[1]))

    yield limit
    limit(None)


def test_a_disk_that_is_full_of_data_leaves_nothing(here, capsys, small_files):
    before = snapshot(here)
    small_files(5000)
    line = fails(capsys, "train", "text", "--out", "runs/new", *TINY, *SHORT)
    small_files(None)
    assert line == "linattn train: runs/new could not be written: File too large"
    assert snapshot(here) == before


def writers(folder: Path) -> dict[str, Callable[[], object]]:
    """Return what writes in the commands, each with more than 5000 bytes: our own code, and the libraries."""
    from matplotlib.figure import Figure
    from tokenizers import Tokenizer, models

    figure, weights = Figure(), torch.zeros(5000)
    figure.add_subplot().plot(range(1000))
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(1000)}, unk_token="word0"))
    return {
        "ours": lambda: write_atomically(folder / "file", 6000 * "x"),
        "copies": lambda: copy_atomically(Path(__file__), folder / "file"),
        "torch": lambda: torch.save(weights, folder / "file"),
        "torch to a stream": lambda: torch.save(weights, open(folder / "file", "wb")),
        "safetensors": lambda: save_file({"weights": weights}, folder / "file"),
        "tokenizers": lambda: words.save(str(folder / "file")),
        "matplotlib": lambda: figure.savefig(folder / "file", format="png"),
    }


def test_every_writers_full_disk_is_told_in_the_same_words(tmp_path, small_files):
    for name, write in writers(tmp_path).items():
        small_files(5000)
        with pytest.raises(CommandError) as error, writing("the file"):
            write()
        small_files(None)
        reason = "the disk is full, or a quota or a limit on files is reached" if name == "torch" else "File too large"
        assert str(error.value) == f"the file could not be written: {reason}", name
    with pytest.raises(RuntimeError, match="another"), writing("the file"):
        raise RuntimeError("another")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is full")
def test_output_that_cannot_be_written_is_told(finished):
    program = [sys.executable, "-m", "linattn.cli", "info", str(finished)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
    line = "linattn info: the output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize("dim", ["64", "96"])
def test_a_checkpoint_that_finds_no_room_is_none(here, capsys, small_files, dim):
    """Of 64 the optimizer's state does not fit, which torch writes; of 96 the weights, which safetensors writes."""
    small_files(250_000)
    capsys.readouterr()
    assert main(["train", "text", "--out", "run", *TINY, *SHORT, "--dim", dim]) == 2
    small_files(None)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("linattn train: run/checkpoints/checkpoint-4 could not be written: ")
    assert os.listdir("run/checkpoints") == []
    assert not Path("run/model.safetensors").exists()
    # with room again, the run goes on
    assert main(["train", "--resume", "--out", "run"]) == 0


LARGE = {
    "weights": (("train", "text", *SHORT, "--dim", "1000000"), "the weights, their gradients and the optimizer (48,0"),
    "batch": (
        ("train", "text", *TINY, *SHORT, "--batch", "1000000000"),
        "the activations of 1,000,000,000 × 32 tokens",
    ),
    "checkpointing": (
        ("train", "text", *TINY, *SHORT, "--batch", "1000000000", "--checkpointing"),
        "the activations of 1,000,000,000 × 32 tokens; a lower --batch (",
    ),
    "segments": (
        ("train", "text", *TINY, *SHORT, "--batch", "1000000000", "--segment", "12"),
        "the activations of 1,000,000,000 × 12 tokens, ",
    ),
    "states": (
        ("train", "text", *TINY, *SHORT, "--batch", "1000000000", "--segment", "12"),
        "for the states between 3 segments; a lower --batch (",
    ),
    "inputs": (("bench", "--batch", "1000000000"), "1,000,000,000 × 8 × 256 × 64 numbers each; a lower --batch"),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_does_not_fit_into_memory_is_told_before_it_is_allocated(here, capsys, name):
    arguments, expected = LARGE[name]
    before = snapshot(here)
    line = fails(capsys, *arguments, "--out", "new", *(() if arguments[0] == "bench" else ("--cpu",)))
    assert "this needs at least " in line and expected in line
    assert snapshot(here) == before


def test_the_demo_fits_into_a_gigabyte(here, capsys, monkeypatch):
    monkeypatch.setattr("linattn.cli.memory.available_memory", lambda cpu: 1e9)
    monkeypatch.setattr("linattn.cli.training._train", lambda *_: None)
    (here / "long.txt").write_text("a sentence. " * 4000)
    assert main(["train", "long.txt", "--out", "run", *demo.MODEL.split(), *demo.TRAINING.split(), "--cpu"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.5 GiB")]
)
def test_memory_that_is_full_later_is_told_and_keeps_the_checkpoint(here, capsys, monkeypatch, error):
    step = RunTrainer.training_step

    def training_step(self, *arguments):
        if self.state.global_step == 5:
            raise error
        return step(self, *arguments)

    monkeypatch.setattr(RunTrainer, "training_step", training_step)
    assert main(["train", "text", "--out", "run", *TINY, *SHORT]) == 2
    what = "9.5 GiB could not be allocated" if str(error) else "an allocation failed"
    line = f"linattn train: the memory is full: {what}; a lower --batch, --context, --dim or --depth needs less"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert os.listdir("run/checkpoints") == ["checkpoint-4"]


def test_a_missing_package_is_told(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("linattn.cli.train")]:
        monkeypatch.delitem(sys.modules, name)
    assert 'pip install "linattn[cli]"' in fails(capsys, "train", str(here / "text"), "--out", str(here / "run"))
    assert not (here / "run").exists()
