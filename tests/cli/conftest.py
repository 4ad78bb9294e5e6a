"""A few kilobytes of text with structure to learn, and a run trained on it once for all the tests that only look."""

import random
from pathlib import Path

import pytest

from linattn.cli.main import main

TINY = (
    "--precision",
    "float32",
    "--dim",
    "16",
    "--depth",
    "1",
    "--num-heads",
    "2",
    "--attention",
    "local+elu",
    "--window",
    "8",
    "--convolution",
    "2",
)
SHORT = (
    "--context",
    "32",
    "--batch",
    "4",
    "--steps",
    "8",
    "--evaluate-every",
    "4",
    "--save-every",
    "4",
    "--log-every",
    "2",
)


def sentences(number: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    words = ["the", "cat", "dog", "sees", "a", "tree", "and", "runs", "över", "hill"]
    return "".join(" ".join(draw.choices(words, k=6)) + ".\n" for _ in range(number))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two files."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(sentences(150), encoding="utf-8")
    (folder / "b.txt").write_text(sentences(50, seed=1), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is complete: for reading only."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    assert main(["train", str(text), "--out", str(run), *TINY, *SHORT]) == 0
    return run


@pytest.fixture(scope="session")
def tokenizer(text: Path) -> Path:
    """Byte-level BPE of the text, as a file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train([str(file) for file in sorted(text.glob("*.txt"))], trainer)
    path = text.parent / "tokenizer.json"
    backend.save(str(path))
    return path
