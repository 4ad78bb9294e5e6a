"""Which blocks FlexAttention is told to look at; what it makes of them is in tests/compiled."""

import itertools

import pytest
import torch

from linattn.ops.softmax.flex import BLOCK, unsupported, visible_blocks
from linattn.ops.softmax.window import Window

WINDOWS = [Window(*options) for options in itertools.product((1, 7, 128, 300), (False, True), (False, True))]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("n", [1, 128, 129, 500])
def test_blocks_are_those_that_some_or_all_pairs_of_which_are_visible(window, n):
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    pairs = window.sees(i, j)
    some, whole = visible_blocks(n, window, torch.device("cpu"))
    for a, b in itertools.product(range(-(-n // BLOCK)), repeat=2):
        block = pairs[a * BLOCK : (a + 1) * BLOCK, b * BLOCK : (b + 1) * BLOCK]
        assert whole[a, b] == block.all()
        assert some[a, b] == (block.any() and not block.all())


def test_it_says_why_it_is_not_for_a_call():
    q = torch.randn(1, 1, 300, 16)
    assert unsupported(q, q) == "needs CUDA tensors, but they are on cpu"
