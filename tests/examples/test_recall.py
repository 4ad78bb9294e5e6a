"""Recall obeys its definition."""

import numpy as np
import pytest
import torch

from examples.learning import recall
from examples.learning.report import state_size
from examples.learning.task import IGNORED

CONTEXT = 2 * recall.PAIRS


def sequences(seed=0, count=200):
    return recall.generate(np.random.default_rng(seed), count)


def test_each_key_is_asked_once_after_the_pairs_and_all_else_is_blank():
    tokens, targets = sequences()
    assert tokens.shape == targets.shape == (200, recall.LENGTH)
    asked = targets != IGNORED
    assert not asked[:, :CONTEXT].any()
    assert torch.equal(asked[:, CONTEXT:], tokens[:, CONTEXT:] != 0)
    for row, where in zip(tokens, asked, strict=True):
        assert sorted(row[where].tolist()) == sorted(row[0:CONTEXT:2].tolist())


def test_the_answer_is_the_value_beside_the_key():
    tokens, targets = sequences()
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        value = dict(zip(row[0:CONTEXT:2], row[1:CONTEXT:2], strict=True))
        assert all(answer == IGNORED or answer == value[token] for token, answer in zip(row, wanted, strict=True))


def test_keys_and_values_are_different_tokens_and_none_repeats():
    tokens, _ = sequences()
    keys, values = tokens[:, 0:CONTEXT:2], tokens[:, 1:CONTEXT:2]
    assert keys.min() == 1 and keys.max() == 127 and values.min() == 128 and values.max() == 255
    assert all(len(set(row)) == recall.PAIRS for row in keys.tolist() + values.tolist())


def test_near_questions_are_likelier_as_a_power_of_the_gap():
    _, targets = recall.generate(np.random.default_rng(0), 50_000, pairs=1)
    assert (targets[:, 3::2] == IGNORED).all()
    share = (targets[:, 2::2] != IGNORED).double().mean(0)
    expected = torch.arange(1, len(share) + 1).double() ** -0.99
    torch.testing.assert_close(share, expected / expected.sum(), rtol=0, atol=0.01)


def test_a_constant_answer_is_right_by_chance_only():
    _, targets = sequences(count=2000)
    answers = targets[targets != IGNORED]
    best = answers.bincount().max() / len(answers)
    assert abs(best - 1 / 128) < 2e-3


def test_seeds_differ_and_repeat():
    assert torch.equal(sequences(3)[0], sequences(3)[0])
    assert not torch.equal(sequences(3)[0], sequences(4)[0])


def test_an_epoch_shows_every_sequence_once_and_none_of_the_test():
    data = recall.Recall(0)
    seen = torch.cat([data.batch()[0] for _ in range(recall.TRAIN // recall.BATCH)])
    rows = {tuple(row) for row in seen.tolist()}
    assert len(rows) == len(seen)
    assert not rows & {tuple(row) for row in data.test[0].tolist()}


@pytest.mark.parametrize("task", recall.TASKS, ids=lambda task: task.name)
def test_a_silu_needs_no_state(task):
    assert recall.with_silu("delta") == "delta+silu" and recall.with_silu("delta:32") == "delta+silu:32"
    pairs = [(name, recall.with_silu(name)) for name in task.methods if recall.with_silu(name) in task.methods]
    assert len(pairs) > 15
    for plain, silu in pairs[::7]:
        assert state_size(task, plain) == state_size(task, silu)
