"""The haystack has its pairs at the beginning, its questions at the end, and nothing of them between."""

import numpy as np
import torch

from examples.learning import haystack
from examples.learning.task import IGNORED
from linattn import LanguageModel

PAIRS = haystack.PAIRS


def sequences(seed=0, count=300, length=100):
    return haystack.generate(np.random.default_rng(seed), count, length=length)


def test_every_key_is_asked_once_at_the_end_and_its_answer_is_the_value_beside_it():
    tokens, targets = sequences()
    assert tokens.shape == targets.shape == (300, 100) and (targets[:, :-PAIRS] == IGNORED).all()
    orders = set()
    for row, wanted in zip(tokens.tolist(), targets[:, -PAIRS:].tolist(), strict=True):
        value = dict(zip(row[0 : 2 * PAIRS : 2], row[1 : 2 * PAIRS : 2], strict=True))
        assert len(value) == len(set(value.values())) == PAIRS
        assert [value[key] for key in row[-PAIRS:]] == wanted and set(row[-PAIRS:]) == set(value)
        orders.add(tuple(list(value).index(key) for key in row[-PAIRS:]))
    assert len(orders) == 24


def test_keys_values_and_other_tokens_are_different():
    tokens, _ = sequences(count=2_000)
    keys, values = tokens[:, 0 : 2 * PAIRS : 2], tokens[:, 1 : 2 * PAIRS : 2]
    others = tokens[:, 2 * PAIRS : -PAIRS]
    ranges = [(part.min().item(), part.max().item()) for part in (keys, values, others)]
    assert ranges == [(1, 63), (64, 127), (128, 255)]


def test_sequences_to_train_on_are_new_and_short():
    data = haystack.Haystack(0)
    first, second = data.batch()[0], data.batch()[0]
    assert first.shape == (haystack.BATCH, 256) and not torch.equal(first, second)
    assert {length: tuple(test[0].shape) for length, test in data.tests.items()} == {
        length: (haystack.TEST, length) for length in (256, 1024, 4096, 16_384)
    }


def test_accuracies_are_those_of_their_lengths(monkeypatch):
    """The answers of a model that finds one pair of the four beyond 1,000 tokens."""
    data, model = haystack.Haystack(0), LanguageModel(haystack.TASK.methods["elu+silu"])
    asked = iter(data.tests.values())

    def measured(model, tokens, targets):
        expected = next(asked)
        assert torch.equal(tokens, expected[0]) and torch.equal(targets, expected[1])
        return tokens.shape[1] / 1000, 1.0 if tokens.shape[1] < 1000 else 0.25

    monkeypatch.setattr(haystack, "loss_and_accuracy", measured)
    assert data.measure(model) == {
        "loss": 0.256,
        "accuracy": 0.25,
        "accuracy_256": 1.0,
        "accuracy_1024": 0.25,
        "accuracy_4096": 0.25,
        "accuracy_16384": 0.25,
    }


def test_all_methods_are_asked_without_positions():
    """A position that training never reached would decide for them."""
    assert all(model.rotary is None and model.positions is None for model in haystack.TASK.methods.values())


def test_a_window_that_does_not_reach_the_pairs_can_know_nothing():
    """Two sequences that differ in their values only have the same answers; a sum has others."""
    tokens, _ = sequences(count=2)
    other = tokens.clone()
    other[:, 1 : 2 * PAIRS : 2] = haystack.VALUES
    with torch.no_grad():
        for name, same in (("local+silu", True), ("elu+silu", False)):
            model = LanguageModel(haystack.TASK.methods[name]).eval()
            assert torch.equal(model(tokens)[:, -PAIRS:], model(other)[:, -PAIRS:]) == same
