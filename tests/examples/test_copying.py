"""Copying obeys its definition."""

import numpy as np
import torch

from examples.learning import copying
from examples.learning.task import IGNORED


def sequences(count=500):
    return copying.generate(np.random.default_rng(0), count)


def test_a_sequence_is_symbols_a_separator_and_the_symbols_again():
    tokens, targets = sequences()
    assert tokens.shape == targets.shape == (500, copying.LENGTH)
    for row in tokens.tolist():
        n = row.index(0)
        assert copying.LENGTH // 4 <= n < (copying.LENGTH - 1) // 2
        assert row[:n] == row[n + 1 : 2 * n + 1] and not any(row[2 * n + 1 :])
        assert all(1 <= symbol <= copying.SYMBOLS for symbol in row[:n])


def test_asked_are_the_copied_symbols_from_the_separator_on():
    tokens, targets = sequences()
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        n = row.index(0)
        assert wanted[n : 2 * n] == row[:n]
        assert set(wanted[:n] + wanted[2 * n :]) == {IGNORED}


def test_every_length_and_symbol_occurs():
    tokens, _ = sequences()
    assert set((tokens == 0).int().argmax(1).tolist()) == set(range(16, 31))
    assert set(tokens.unique().tolist()) == set(range(copying.SYMBOLS + 1))


def test_batches_are_new_and_not_those_of_the_test():
    data = copying.Copying(0)
    first, second = data.batch()[0], data.batch()[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, data.test[0][: copying.BATCH])
