"""Lookups are what they are defined to be, and save what a text repeats."""

import random

import pytest
import torch

from examples.learning import lookups, positions
from tests.examples.test_positions import model


def definition(text: bytes, place: int, first: int) -> tuple[int, int]:
    """Try every length and every earlier place."""
    best = (0, 0)
    for size in range(lookups.SHORTEST, lookups.LONGEST + 1):
        for found in range(first, place - size):
            if place - size >= first and text[found : found + size] == text[place - size : place]:
                best = size, text[found + size]
    return best


@pytest.mark.parametrize("first", [0, 37])
def test_the_longest_match_is_found(first):
    rng = random.Random(0)
    text = bytes(rng.choices(b"ab", k=60)) + b"x" * 40 + bytes(rng.choices(b"abc", k=60))
    expected = [definition(text, place, first) for place in range(first, len(text))]
    assert [lookups.longest_match(text, place, first) for place in range(first, len(text))] == expected
    assert {length for length, _ in expected} >= {0, 3, 4, 5, lookups.LONGEST}
    lengths, hits = lookups.matches(text, range(first, len(text)), first)
    assert lengths.tolist() == [length for length, _ in expected]
    right = [length > 0 and after == text[first + i] for i, (length, after) in enumerate(expected)]
    assert hits.tolist() == right and 0 < sum(right) < len(right)


def test_no_other_weights_give_the_bytes_a_higher_probability():
    torch.manual_seed(0)
    own, lengths = torch.rand(2_000, dtype=torch.float64), torch.randint(2, 5, (2_000,))
    lengths[lengths == 2] = 0
    hits = (torch.rand(2_000) < 0.6).double() * (lengths > 0)
    found = lookups.mixture_weights(own, lengths, hits, rounds=2_000)

    def bits(weights):
        return float(-(weights[lengths] * hits + (1 - weights[lengths]) * own).log2().mean())

    assert found[0] == 0 and all(0.05 < found[length] < 0.95 for length in (3, 4))
    for length in (3, 4):
        for other in torch.linspace(0, 0.99, 67, dtype=torch.float64):
            assert bits(found) <= bits(found.index_fill(0, torch.tensor([length]), float(other))) + 1e-9
    # documents are measured with the weights of the others
    documents = torch.arange(2_000) // 500
    odd = documents % 2 == 1
    parts = [lookups.mixture_weights(own[part], lengths[part], hits[part])[lengths] for part in (~odd, odd)]
    weights = torch.where(odd, *parts)
    expected = float(-(weights * hits + (1 - weights) * own).log2().mean())
    assert lookups.mixture_bits(own, lengths, hits, documents) == pytest.approx(expected, abs=1e-12)


def test_lookups_save_what_only_the_far_past_has():
    texts = [torch.randint(256, (1_500,)) for _ in range(4)]
    begin = torch.tensor([256])
    once = [torch.cat([begin, text, torch.randint(256, (1_500,))]) for text in texts]
    twice = [torch.cat([begin, text, text]) for text in texts]
    near = [torch.cat([begin, *[text[:100]] * 30]) for text in texts]
    own = model("local", window=8)
    saved = [positions.measure(own, each, 65_536)[2]["lookup"] for each in (once, twice, near)]
    assert saved[0] == pytest.approx(0, abs=0.02)
    # at least half of the parts are read again, at 8 bits a byte or more
    assert saved[1] > 4 and saved[2] == pytest.approx(0, abs=0.2)
