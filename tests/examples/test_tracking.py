"""State tracking obeys its definition."""

from itertools import permutations

import numpy as np
import pytest
import torch

from examples.learning import tracking
from linattn import LanguageModel


def sequences(group, count=50, length=40):
    return tracking.generate(np.random.default_rng(0), count, group, length=length)


def test_parity_is_the_sum_of_the_bits_so_far():
    tokens, targets = sequences(tracking.bits())
    assert torch.equal(targets, tokens.cumsum(1) % 2)
    assert set(tokens.unique().tolist()) == {0, 1}


@pytest.mark.parametrize(("count", "swaps"), [(3, True), (3, False), (5, False)])
def test_a_product_of_permutations_applies_one_after_the_other(count, swaps):
    tokens, targets = sequences(tracking.permutations_of(count, swaps=swaps))
    elements = list(permutations(range(count)))
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        things = np.arange(count)
        for token, target in zip(row, wanted, strict=True):
            things = things[list(elements[token])]
            assert tuple(things) == elements[target]
            # a swap moves two
            assert not swaps or (np.array(elements[token]) != np.arange(count)).sum() <= 2
    assert set(targets.unique().tolist()) == set(range(len(elements)))


@pytest.mark.parametrize("group", (tracking.bits(), tracking.permutations_of(3)))
def test_products_form_a_group(group):
    products, n = group.products, len(group.products)
    assert all(sorted(row) == list(range(n)) for row in (*products.tolist(), *products.T.tolist()))
    i, j, k = np.ogrid[:n, :n, :n]
    assert (products[products[i, j], k] == products[i, products[j, k]]).all()


def right_before_48(tokens):
    """Return logits of the parities up to a place, and of zeros after it."""
    parities = tokens.cumsum(1) % 2
    parities[:, 48:] = 0
    return torch.nn.functional.one_hot(parities, 2).float()


def test_accuracies_are_those_of_their_places(monkeypatch):
    monkeypatch.setattr(tracking, "TEST", 400)
    data, model = tracking.Tracking(0, group=tracking.bits()), LanguageModel(tracking.TASKS[0].methods["elu"])
    monkeypatch.setattr(model, "hidden", right_before_48)
    monkeypatch.setattr(model, "logits", lambda hidden: hidden)
    figures = data.measure(model)
    assert [figures[f"accuracy_{end}"] for end in (16, 32, 48)] == [1, 1, 1]
    assert all(figures[f"accuracy_{end}"] == pytest.approx(0.5, abs=0.05) for end in (64, 80, 96, 112, 128))
    assert figures["accuracy"] == pytest.approx((1 + 5 * 0.5) / 6, abs=0.02)


def test_training_sequences_are_a_quarter_as_long_and_new():
    data = tracking.Tracking(0, group=tracking.bits())
    first, second = data.batch()[0], data.batch()[0]
    assert first.shape == (tracking.BATCH, 32) and data.test[0].shape == (tracking.TEST, 128)
    assert not torch.equal(first, second)
