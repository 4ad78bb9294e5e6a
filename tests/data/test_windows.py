"""Each token is predicted once a pass, and window i does not depend on what was seen before."""

from collections import Counter

import numpy as np
import pytest

from linattn.data.windows import TrainingWindows, validation_windows

LENGTHS = [(10, 10), (11, 10), (19, 10), (20, 10), (100, 2), (1000, 65), (4096, 64)]


def predicted(windows, indices) -> Counter[int]:
    """How often each token is predicted: the first of a window is only given."""
    return Counter(int(token) for i in indices for token in windows[i]["labels"][1:])


@pytest.mark.parametrize("tokens, context", LENGTHS)
def test_a_pass_predicts_nothing_twice_and_leaves_little_out(tokens, context):
    windows = TrainingWindows(np.arange(tokens), context, seed=0, length=10**6)
    for number in range(3):
        counts = predicted(windows, range(number * windows.per_pass, (number + 1) * windows.per_pass))
        assert max(counts.values()) == 1
        assert len(counts) > tokens - 1 - 2 * context


def test_no_token_is_left_out_of_every_pass():
    windows = TrainingWindows(np.arange(30), 10, seed=0, length=10**6)
    assert sorted(predicted(windows, range(60 * windows.per_pass))) == list(range(1, 30))


@pytest.mark.parametrize("tokens, context", LENGTHS)
def test_validation_predicts_each_token_once(tokens, context):
    windows = validation_windows(np.arange(tokens), context, most=10**6)
    counts = predicted(windows, range(len(windows)))
    assert max(counts.values()) == 1
    assert sorted(counts) == list(range(1, len(counts) + 1))
    assert len(counts) > tokens - 1 - context


def test_fewer_validation_windows_are_spread_over_all():
    windows = validation_windows(np.arange(10_001), 11, most=5)
    assert [int(windows[i]["input_ids"][0]) for i in range(5)] == [0, 2500, 5000, 7490, 9990]


def test_a_window_is_a_function_of_the_seed_and_its_number():
    tokens = np.arange(1000)
    one, other = (TrainingWindows(tokens, 10, seed=3, length=10**6) for _ in range(2))
    forwards = [one[i]["input_ids"].tolist() for i in range(500)]
    assert forwards == [other[i]["input_ids"].tolist() for i in reversed(range(500))][::-1]
    different = TrainingWindows(tokens, 10, seed=4, length=10**6)
    assert forwards != [different[i]["input_ids"].tolist() for i in range(500)]


def test_passes_differ_in_order_and_offset():
    windows = TrainingWindows(np.arange(1000), 10, seed=0, length=10**6)
    passes = [
        [int(windows[i + k * windows.per_pass]["input_ids"][0]) for i in range(windows.per_pass)] for k in range(9)
    ]
    assert len({min(starts) for starts in passes}) > 3
    assert len({tuple(np.argsort(starts)) for starts in passes}) == 9


def test_windows_are_consecutive_tokens():
    tokens = np.random.default_rng(0).integers(0, 60_000, 300).astype("<u2")
    item = TrainingWindows(tokens, 64, seed=0, length=1)[0]
    assert item["input_ids"].tolist() in [tokens[i : i + 64].tolist() for i in range(237)]
    assert item["input_ids"].tolist() == item["labels"].tolist()
