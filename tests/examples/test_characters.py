"""The text is split and cut into windows as told."""

import random
import string

import pytest
import torch

from examples.learning import characters
from examples.learning.task import IGNORED


@pytest.fixture
def text(tmp_path):
    letters = random.Random(0).choices(string.ascii_letters, k=2000)
    path = tmp_path / "text"
    path.write_text("".join(letters))
    return path


def test_the_last_tenth_is_for_validation(text):
    train, validation = characters.split(text)
    assert (len(train), len(validation)) == (1800, 200)
    alphabet = sorted(set(text.read_text()))
    assert "".join(alphabet[i] for i in torch.cat([train, validation])) == text.read_text()


@pytest.mark.parametrize("length", (2, 64, 65, 66, 200))
def test_windows_ask_for_every_token_but_the_first_once(length):
    tokens = torch.arange(length)
    inputs, targets = characters.windows(tokens)
    asked = targets != IGNORED
    assert torch.equal(targets[asked], tokens[1:])
    assert torch.equal(inputs[asked], tokens[:-1])


def test_a_batch_asks_for_the_next_character(text):
    data = characters.Characters(0, text)
    tokens, targets = data.batch()
    assert tokens.shape == targets.shape == (characters.BATCH, characters.LENGTH)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_a_batch_is_from_any_place_of_the_training_text(text):
    data = characters.Characters(0, text)
    # 36 places to begin at
    data.train = torch.arange(100)
    targets = torch.cat([data.batch()[1].flatten() for _ in range(100)])
    assert set(targets.tolist()) == set(range(1, 100))


def test_a_missing_text_and_a_strange_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--data"):
        characters.Characters(0, None)
    path = tmp_path / "text"
    path.write_text("".join(map(chr, range(200, 300))))
    with pytest.raises(ValueError, match="has 100"):
        characters.split(path)
