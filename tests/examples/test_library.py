"""The bytes of the library are split by file and cut into windows as told."""

import math
import sysconfig
from dataclasses import replace

import numpy as np
import pytest
import torch

from examples.learning import library
from examples.learning.task import IGNORED
from linattn import LanguageModel
from linattn.cli.options import GATED_DEFAULTS, TrainOptions


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A library of 31 modules of 100 equal bytes each, with tests and packages of others beside them."""
    for i in range(31):
        (tmp_path / f"m{i:02}.py").write_bytes(bytes([i]) * 100)
    for folder in ("test", "site-packages", "email/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_bytes(b"\xff")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(library, "TEST", 128)
    library.split.cache_clear()
    yield
    library.split.cache_clear()


def test_every_15th_file_is_held_out_and_tests_are_left_out(small):
    train, held_out = library.split()
    assert held_out.tolist() == [i for i in (0, 15, 30) for _ in range(100)]
    assert train.tolist() == [i for i in range(31) if i % 15 for _ in range(100)]


def test_the_last_tenth_of_a_text_is_held_out(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(200)))
    train, held_out = library.split(text)
    assert train.tolist() == list(range(180)) and held_out.tolist() == list(range(180, 200))
    for task in library.PROSE + library.PLAYS:
        with pytest.raises(ValueError, match="bytes of a text need the text: --data PATH"):
            task.prepare(0, None)
    # a file's bytes are read once
    long = tmp_path / "long"
    long.write_bytes(bytes(range(250)) * 100)
    tokens, targets = library.PROSE[0].prepare(0, long).batch()
    assert torch.equal((tokens + 1) % 250, targets)


def test_the_text_of_other_tasks_is_not_that_of_the_library(small, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"x" * 10_000)
    tokens, _ = library.TASKS[0].prepare(0, other).batch()
    assert ord("x") not in tokens


def test_a_batch_asks_for_the_next_byte(small):
    tokens, targets = library.Library(0, length=256).batch()
    assert tokens.shape == targets.shape == (8, 256)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not {0, 15, 30} & set(tokens.unique().tolist())


@pytest.mark.parametrize("length", (16, 64))
def test_as_many_bytes_are_measured_at_any_length(small, length):
    tokens, targets = library.Library(0, length=length).test
    assert tokens.numel() == targets.numel() == 128 and tokens.shape[1] == length
    assert torch.equal(tokens[:, 1:], targets[:, :-1]) and set(tokens.unique().tolist()) <= {0, 15, 30}
    np.testing.assert_array_equal(tokens, library.Library(1, length=length).test[0])


def test_bits_are_those_of_the_loss(small):
    figures = library.Library(0, length=16).measure(LanguageModel(library.TASKS[0].methods["softmax+convolution"]))
    assert figures["bits"] == pytest.approx(figures["loss"] / math.log(2))


def test_a_passage_is_read_again_after_another_text(small):
    text = torch.arange(300) % 256
    (again, asked), (once, also) = library.repeats(text)
    assert again.shape == once.shape == asked.shape == (library.PASSAGES, 2 * library.PASSAGE + library.GAP - 1)
    assert torch.equal(asked, also)
    for x, targets in ((again, asked), (once, also)):
        where = targets != IGNORED
        assert where.sum(1).unique().tolist() == [library.PASSAGE - 1] and where[:, -1].all()
        assert torch.equal(x[:, 1:][where[:, :-1]], targets[:, :-1][where[:, :-1]])
        # a passage goes on where the text between ends
        assert ((targets[where] - x[where]) % 256 == 1).all()
    assert torch.equal(again[:, : library.PASSAGE - 1], again[:, -library.PASSAGE + 1 :])
    assert torch.equal(again[:, library.PASSAGE :], once[:, library.PASSAGE :]) and not torch.equal(again, once)


def test_what_a_second_reading_saves():
    class Remembers(torch.nn.Module):
        """Gives what stood a passage and a gap before the next byte half of the probability."""

        def hidden(self, tokens):
            return torch.nn.functional.one_hot(tokens.roll(library.PASSAGE + library.GAP - 1, 1), 256).double()

        def logits(self, x):
            return x * math.log(255)

    data = library.Library(0, length=256)
    (again, asked), (once, _) = data.repeats
    before = [x.roll(library.PASSAGE + library.GAP - 1, 1)[asked != IGNORED] for x in (again, once)]
    wanted = asked[asked != IGNORED]
    assert (before[0] == wanted).all()
    # 1 bit where it is right, and else that of 1 of 510
    missed = (before[1] != wanted).double().mean().item()
    assert data.measure(Remembers())["saved"] == pytest.approx(missed * (math.log2(510) - 1), abs=1e-6)


def test_the_commands_defaults_are_what_was_measured():
    """The model of its table of widths, but for the size of windows, the separator and induction, which is compared in
    other tables, and as many bytes per update."""
    options = TrainOptions()
    own = replace(TrainOptions(**GATED_DEFAULTS).language_model(256), window=64, induction=False)
    measured = library.SIZES[0]
    assert own == measured.methods["hybrid:128"]
    assert (options.context, options.batch * options.context) == (measured.length, library.BATCH)
    assert (options.lr, options.optimizer) == (measured.training.lr, measured.training.optimizer)
