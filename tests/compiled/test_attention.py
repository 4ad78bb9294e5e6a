"""Attentions in one graph, whatever the mask; backends of the compiler do not matter for that."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.attention import ATTENTIONS, attend, named, named_attention, traits


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


# what a function can hold
UNTRAINED = [name for name in ATTENTIONS if not traits(name).learned and not traits(name).gated]


@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize("spec", [*UNTRAINED, "local+elu"])
def test_attend_by_name_in_one_graph(spec, dynamic, monkeypatch):
    """Which is made while the graph is, with features from the fixed seed, and again for other heads, channels and
    dtypes. No random number is drawn from the caller's generator."""
    monkeypatch.setattr(named, "_SHARED", {})
    causal = not traits(spec.partition("+")[0]).bidirectional
    run = torch.compile(
        partial(attend, method=spec, is_causal=causal), fullgraph=True, dynamic=dynamic, backend="eager"
    )
    before = torch.get_rng_state()
    for h, n, d, dtype in ((2, 6, 8, torch.float32), (2, 9, 8, torch.float32), (4, 9, 12, torch.float64)):
        q, k, v = torch.linspace(-1, 1, 3 * h * n * d, dtype=dtype).sin().view(3, 1, h, n, d)
        compiled = run(q, k, v)
        monkeypatch.setattr(named, "_SHARED", {})
        assert_close(attend(q, k, v, spec, is_causal=causal), compiled)
    assert torch.equal(torch.get_rng_state(), before)


class Attend(nn.Module):
    def forward(self, q, k, v):
        return attend(q, k, v, "favor", is_causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_attention_by_name_has_the_features_of_the_seed(strict, monkeypatch):
    """Which stay numbers for the calls after it."""
    monkeypatch.setattr(named, "_SHARED", {})
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    exported = torch.export.export(Attend(), (q, k, v), strict=strict).module()
    for _ in range(2):
        assert_close(exported(q, k, v), Attend()(q, k, v))
    assert_close(torch.compile(Attend(), backend="eager", fullgraph=True)(q, k, v), Attend()(q, k, v))


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
