"""Which blocks FlexAttention is told to look at; what it makes of them is in tests/compiled."""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from linattn.ops.softmax import flex
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


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_both_tables_are_those_that_torch_finds(window, masked, monkeypatch):
    """Gradients on a GPU read which queries see a block of keys; torch derives it from which keys a query sees."""
    n, found = 500, []

    def kernel(q, k, v, *, block_mask, **options):
        found.append(block_mask)
        return q

    monkeypatch.setattr(flex, "_kernel", lambda device: kernel)
    q = torch.randn(1, 1, n, 16)
    flex.flex_window(q, q, q, window=window, present=torch.arange(n)[None, None] < 300 if masked else None)
    keys = [getattr(found[0], f"{kind}kv_{what}") for kind in ("", "full_") for what in ("num_blocks", "indices")]
    exact = BlockMask.from_kv_blocks(*keys, BLOCK_SIZE=BLOCK, seq_lengths=(n, n))
    assert found[0].seq_lengths == exact.seq_lengths and found[0].BLOCK_SIZE == exact.BLOCK_SIZE
    for kind, what in itertools.product(("", "full_"), ("num_blocks", "indices")):
        name = f"{kind}q_{what}"
        assert torch.equal(getattr(found[0], name), getattr(exact, name)), name


def test_it_says_why_it_is_not_for_a_call():
    q = torch.randn(1, 1, 300, 16)
    assert unsupported(q, q) == "needs CUDA tensors, but they are on cpu"
