"""What the delta rule promises, beside the laws of every attention."""

import torch
from torch.testing import assert_close

from linattn.attention import DeltaAttention, Gates
from tests.attention.cases import gates_of, heads


def test_a_key_of_any_length_answers_with_the_last_value_written():
    inner, v = DeltaAttention(), torch.randn(1, 1, 4, 3, dtype=torch.float64)
    k = torch.randn(1, 1, 2, 6, dtype=torch.float64)
    k = torch.cat([k, 5 * k], 2)
    ones = Gates(beta=torch.ones(1, 1, 4, dtype=torch.float64))
    q = k * 6**0.5 / k.norm(dim=-1, keepdim=True)
    assert_close(inner(k, k, v, gates=ones) * 6**0.5, v)
    raw = DeltaAttention(unit_keys=False)
    unit = k / k.norm(dim=-1, keepdim=True)
    assert_close(raw(q, unit, v, gates=ones), v)


def test_a_strength_of_zero_writes_nothing():
    inner, (q, k, v) = DeltaAttention(decay="head"), heads(50)
    gates = gates_of(inner.needs, k)
    silent = gates._replace(beta=gates.beta.index_fill(-1, torch.arange(25, 50), 0))
    _, before = inner.extend(*(x[:, :, :25] for x in (q, k, v)), gates=Gates(*(x[:, :, :25] for x in gates)))
    _, after = inner.extend(q, k, v, gates=silent)
    faded = gates.log_decay[:, :, 25:].sum(-1).exp()
    assert_close(after.S, before.S * faded[:, :, None, None, None])


def test_zero_keys_stay_zeros():
    inner, (q, k, v) = DeltaAttention(), [x.requires_grad_() for x in heads(10)]
    with torch.no_grad():
        k[:, :, 3] = 0
        q[:, :, 5] = 0
    y = inner(q, k, v, gates=gates_of(inner.needs, k.detach()))
    assert not y[:, :, 5].any()
    y.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_strong_decays_keep_only_the_last_token():
    """A decay of e⁻²⁰ per token, in float32, and gradients that are numbers."""
    for decay in ("head", "channel"):
        inner, (q, k, v) = DeltaAttention(decay=decay), [x.float().requires_grad_() for x in heads(130)]
        gates = gates_of(inner.needs, k.detach())
        gates = Gates(torch.full_like(gates.log_decay, -20.0).requires_grad_(), gates.beta)
        y = inner(q, k, v, gates=gates)
        exact = inner(*(x.double() for x in (q, k, v)), gates=Gates(*(x.double() for x in gates)))
        assert_close(y.double(), exact, rtol=1e-4, atol=1e-6)
        gradients = torch.autograd.grad(y.square().sum(), (q, k, v, gates.log_decay))
        assert all(x.isfinite().all() for x in gradients)
