"""Each token is predicted once a pass, and window i does not depend on what was seen before."""

from collections import Counter

import numpy as np
import pytest

from linattn.data.row import Piece, TokenRow
from linattn.data.windows import TrainingWindows, WindowChains, count_turns, validation_windows

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


SEPARATOR = 10**6
# a document of one token, some shorter than a window, some longer, and one that ends with a window
SIZES = (1, 3, 40, 9, 10, 118, 2, 27, 64)


def documents(sizes=SIZES) -> np.ndarray:
    """Tokens that are all different, but for the separators that begin documents."""
    tokens = np.arange(sum(sizes))
    tokens[np.cumsum((0, *sizes[:-1]))] = SEPARATOR
    return tokens


def window_chains(tokens=None, context=10, **changes) -> WindowChains:
    options = {"seed": 0, "length": 10**6, "rows": 4, "share": 1.0}
    tokens = documents() if tokens is None else tokens
    edges = np.append(np.flatnonzero(tokens == SEPARATOR), len(tokens))
    return WindowChains(TokenRow([Piece(tokens, edges)]), context, **(options | changes))


def rows_of(windows: WindowChains, steps: int) -> list[list[dict]]:
    return [[windows[step * windows.rows + row] for step in range(steps)] for row in range(windows.rows)]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_window_that_continues_goes_on_in_its_document(share):
    """Its first token is the last one of the window before, and no document begins between them. A document's first
    window continues none, and neither does a row's first one in a pass; of all others this share does."""
    windows, continues = window_chains(share=share), []
    for row in rows_of(windows, 400):
        for number, item in enumerate(row):
            if number % windows.per_row == 0 or item["input_ids"][0] == SEPARATOR:
                assert not item["continues"]
            else:
                continues.append(bool(item["continues"]))
            if item["continues"]:
                before = row[number - 1]["input_ids"].tolist()
                assert before[-1] == item["input_ids"][0] and SEPARATOR not in before[1:]
    assert np.mean(continues) == pytest.approx(share, abs=0.05 * (share < 1))


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_passes_over_documents_leave_nothing_out(rows):
    """What the rows do not have room for is left out of one pass, at random, and so not of all."""
    windows = window_chains(rows=rows)
    assert set(predicted(windows, range(30 * rows * windows.per_row))) == set(documents()[1:].tolist())


def test_windows_of_documents_are_functions_of_the_seed_and_their_numbers():
    def seen(windows, order):
        items = {i: windows[i] for i in order}
        return [(items[i]["input_ids"].tolist(), bool(items[i]["continues"])) for i in sorted(items)]

    one = seen(window_chains(share=0.5), range(100))
    assert one == seen(window_chains(share=0.5), reversed(range(100)))
    assert one != seen(window_chains(share=0.5, seed=1), range(100))


def test_few_windows_serve_many_rows():
    tokens = documents((12,))
    assert [item["input_ids"].tolist() for item in map(window_chains(tokens).__getitem__, range(8))] == [
        tokens[:10].tolist()
    ] * 8


def test_rows_of_turns_are_no_shorter_than_chains_need():
    assert [count_turns(windows, 8) for windows in (1, 255, 256, 511, 512, 10**6)] == [1, 1, 1, 1, 2, 16]
