import itertools

import pytest
import torch
from torch.testing import assert_close

from linattn.ops.softmax.local import extend_local, in_blocks, in_equal_blocks, local_attention
from linattn.ops.softmax.window import Window


@pytest.mark.parametrize("window", [Window(7), Window(7, True), Window(7, bucketed=True), Window(70, True, True)])
def test_layouts_do_not_matter(window):
    """Heads cut out of one projection, as models have them, and keys that are expanded views."""
    both = torch.randn(2, 150, 3, 4, 8, dtype=torch.float64).transpose(1, 3)
    q, k, v = both.unbind(2)
    dense = local_attention(*(x.contiguous() for x in (q, k, v)), window=window)
    assert_close(local_attention(q, k, v, window=window), dense)
    shared = k[:, :1].expand(-1, 4, -1, -1)
    dense = local_attention(q, shared.contiguous(), v, window=window)
    assert_close(local_attention(q, shared, v, window=window), dense)


@pytest.mark.parametrize("shape", [(0, 4, 9), (2, 4, 0), (2, 0, 9)])
def test_nothing_in_nothing_out(shape):
    q, window = torch.randn(*shape, 8), Window(3, causal=True)
    y, state = extend_local(q, q, q, window=window)
    assert y.shape == q.shape and state.k.shape == (*shape[:2], 2, 8)
    assert extend_local(q, q, q, state, window=window)[0].shape == q.shape


def test_masked_tokens_leave_the_state_as_it_was():
    window, x = Window(4, causal=True), [torch.randn(2, 1, 9, 8) for _ in range(3)]
    _, state = extend_local(*x, window=window)
    nothing = torch.zeros(2, 1, 9, dtype=torch.bool)
    y, after = extend_local(*x, state, window=window, key_mask=nothing)
    assert not y.any()
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bucketed", [False, True])
def test_the_blocks_of_an_exported_graph_see_the_same(causal, bucketed):
    for size, n, masked in itertools.product((1, 7, 65, 300), (1, 64, 200), (False, True)):
        q, k, v = (torch.randn(2, h, n, d, dtype=torch.float64).requires_grad_() for h, d in ((4, 5), (2, 5), (2, 3)))
        real = torch.arange(n) < torch.tensor([[[n], [n // 2]], [[1], [n]]]) if masked else None
        shown = torch.ones(()) if real is None else real.repeat_interleave(2, 1).unsqueeze(-1)
        window = Window(size, causal, bucketed)
        found, expected = (shown * attend(q, k, v, window, real) for attend in (in_equal_blocks, in_blocks))
        assert_close(found, expected)
        upstream = torch.randn_like(found)
        gradients = (torch.autograd.grad(y, (q, k, v), upstream) for y in (found, expected))
        for gradient, other in zip(*gradients, strict=True):
            assert_close(gradient, other)
