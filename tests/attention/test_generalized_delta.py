"""What the generalized delta rule promises, beside the laws of every attention."""

import pytest
import torch
from torch.testing import assert_close

from linattn.attention import DeltaAttention, Gates, GeneralizedDeltaAttention
from tests.attention.cases import gates_of, heads
from tests.attention.definitions import generalized


def test_one_key_and_a_rate_of_one_are_the_delta_rule():
    """With a = 1 and keys of length 1, what is removed and what is written have the same key; and nothing fades."""
    q, k, v = heads(70)
    k = k / k.norm(dim=-1, keepdim=True)
    inner, hk, d = GeneralizedDeltaAttention(k.shape[1], k.shape[3]).double(), k.shape[1], k.shape[3]
    ones = torch.ones(2, hk, 70, dtype=torch.float64)
    y = inner(q, k, v, gates=Gates(torch.zeros_like(k), torch.ones_like(k)))
    assert_close(y, DeltaAttention(unit_keys=False)(q, k, v, gates=Gates(beta=ones)))
    assert inner.removal_weight.shape == (hk, d)


def test_decays_as_strong_as_float16_can_undo():
    """The removal reads the state before it fades, as in the paper."""
    q, k, v = (x.float() for x in heads(40))
    inner = GeneralizedDeltaAttention(k.shape[1], k.shape[3])
    gates = gates_of(inner.needs, k)._replace(log_decay=torch.full_like(k, -9.9))
    doubles = [x.double() for x in (q, k, v)]
    exact = generalized(inner.double(), *doubles, Gates(*(x.double() for x in gates)))
    assert_close(inner(*doubles, gates=gates), exact, rtol=1e-5, atol=1e-7)
    for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
        y = inner.to(dtype)(*(x.to(dtype) for x in (q, k, v)), gates=Gates(*gates))
        assert (y.double() - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize("strength", [-10.5, -9e3])
def test_decays_that_cannot_be_undone_are_refused(strength):
    q, k, v = heads(5)
    inner = GeneralizedDeltaAttention(k.shape[1], k.shape[3]).double()
    gates = gates_of(inner.needs, k)
    gates.log_decay[1, 0, 3, 2] = strength
    with pytest.raises(ValueError, match="log decays must be at least -10, or -inf where a sequence begins"):
        inner(q, k, v, gates=gates)


@pytest.mark.parametrize("sizes", [(1, 6), (4, 6), (2, 1)])
def test_other_heads_or_channels_are_refused(sizes):
    inner, (q, k, v) = GeneralizedDeltaAttention(*sizes).double(), heads(5)
    for n in (5, 1):
        x = [t[:, :, :n] for t in (q, k, v)]
        with pytest.raises(ValueError, match=f"made for {sizes[0]} key heads of {sizes[1]} channels, but .* 2 of 6"):
            inner(*x, gates=gates_of(inner.needs, x[1]))


def test_where_a_sequence_begins_nothing_is_read_from_before():
    inner, (q, k, v) = GeneralizedDeltaAttention(2, 6).double(), heads(30)
    gates = gates_of(inner.needs, k)
    log_decay = gates.log_decay.index_fill(2, torch.tensor([12]), -torch.inf)
    y, state = inner.extend(q, k, v, gates=gates._replace(log_decay=log_decay))
    alone, end = inner.extend(*(x[:, :, 12:] for x in (q, k, v)), gates=Gates(*(x[:, :, 12:] for x in gates)))
    assert_close(y[:, :, 12:], alone)
    assert_close(state.S, end.S)
