"""Attentions in one graph, whatever the mask; backends of the compiler do not matter for that."""

import pytest
import torch
from torch.testing import assert_close

from linattn.attention import named_attention


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("spec", "causal", "masked"),
    [
        ("local", False, True),
        ("local_bucketed", True, True),
        ("local_bucketed", True, False),
        ("softmax", True, True),
        ("softmax", True, False),
        ("softmax", False, True),
        ("linformer_mean", False, True),
        ("linformer", False, True),
        ("linformer", False, False),
        ("local+elu", True, True),
    ],
)
def test_one_graph(spec, causal, masked):
    inner = named_attention(spec, num_heads=4, num_key_heads=2, head_dim=8, causal=causal, window=5, max_length=200)
    x = [torch.randn(2, h, 150, 8, requires_grad=True) for h in (4, 2, 2)]
    key_mask = torch.rand(2, 1, 150) < 0.6 if masked else None
    run = torch.compile(inner, fullgraph=True, backend="aot_eager")
    assert_close(run(*x, key_mask=key_mask), inner(*x, key_mask=key_mask))
    run(*x, key_mask=key_mask).sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in x)


# the mixture's first part is a window that is not bucketed
@pytest.mark.parametrize("spec", ["local_bucketed", "softmax", "local+elu"])
def test_extend_in_one_graph(spec):
    """A prompt, some tokens of which some are missing, and one token, missing in one row and not masked in the next."""
    inner = named_attention(spec, num_heads=4, num_key_heads=2, head_dim=8, causal=True, window=5)
    extend = torch.compile(inner.extend, fullgraph=True, backend="aot_eager")
    x = [torch.randn(2, h, 21, 8) for h in (4, 2, 2)]
    masks = None, torch.rand(2, 1, 7) < 0.6, torch.tensor([True, False]).view(2, 1, 1), None
    state = compiled = None
    for piece, mask in zip((slice(0, 12), slice(12, 19), slice(19, 20), slice(20, 21)), masks, strict=True):
        y, state = inner.extend(*(t[..., piece, :] for t in x), state, key_mask=mask)
        actual, compiled = extend(*(t[..., piece, :] for t in x), compiled, key_mask=mask)
        assert_close(actual, y)


# with each of the compiler's modes, this is a law of the operators: see test_linear.py
@pytest.mark.parametrize("spec", ["softmax", "local:1+elu:2"])
def test_one_tensor_may_be_queries_keys_and_values(spec):
    inner = named_attention(spec, num_heads=3, head_dim=8, causal=True, window=5).double()
    run = torch.compile(inner, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (70, 90):
        x = torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True)
        y, expected = run(x, x, x), inner(x, x, x)
        assert_close(y, expected)
        upstream = torch.randn_like(y)
        assert_close(torch.autograd.grad(y, x, upstream), torch.autograd.grad(expected, x, upstream))
