"""The running maximum against an exact log-sum-exp, at sizes of which the exponential overflows any dtype."""

import pytest
import torch
from torch.testing import assert_close

from linattn.ops import causal_linear_attention
from linattn.ops.calls import SHORT
from linattn.ops.scale import running_scale


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("decaying", [False, True])
def test_weights_are_those_of_a_softmax(size: float, decaying: bool) -> None:
    """One feature, exp(s_j): then attention is the causal softmax of s, with a decay of s minus the age."""
    n = 150
    s, v = size * torch.randn(2, n, dtype=torch.float64), torch.randn(2, n, 3, dtype=torch.float64)
    log_decay = -torch.rand(2, n, dtype=torch.float64) if decaying else None
    m, decay, _ = running_scale(s, log_decay)
    k = (s - m).exp().unsqueeze(-1)
    y, _ = causal_linear_attention(torch.ones_like(k), k, v, log_decay=decay)
    age = torch.zeros(2, n, n, dtype=torch.float64)
    if log_decay is not None:
        total = log_decay.cumsum(-1)
        age = total.unsqueeze(-1) - total.unsqueeze(-2)
    scores = (s.unsqueeze(-2) + age).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    assert_close(y, scores.softmax(-1) @ v)


@pytest.mark.parametrize("decaying", [False, True])
def test_pieces_make_the_whole_bit_by_bit(decaying: bool) -> None:
    # without decay scales are rounded, and only large ones differ
    s = (10 if decaying else 100) * torch.randn(2, 80)
    log_decay = -torch.rand(2, 80) if decaying else None
    whole, _, end = running_scale(s, log_decay)
    start, pieces = None, []
    for part in (slice(0, 1), slice(1, 1), slice(1, 33), slice(33, 80)):
        m, _, start = running_scale(s[:, part], None if log_decay is None else log_decay[:, part], start)
        pieces.append(m)
    assert whole.unique().numel() > 2
    assert_close(torch.cat(pieces, -1), whole, rtol=1e-6, atol=1e-6 if decaying else 0)
    assert_close(start, end, rtol=1e-6, atol=1e-6 if decaying else 0)


def test_no_key_yet_is_no_scale() -> None:
    s = torch.tensor([[-torch.inf, -torch.inf, 20.0, -torch.inf, 50.0]])
    m, decay, last = running_scale(s)
    assert decay is not None
    assert m.tolist() == [[0, 0, 24, 24, 48]] and decay.tolist() == [[0, 0, 0, 0, -24]] and last.tolist() == [[50]]


@pytest.mark.parametrize("size", [1.0, 100.0, 1000.0])
def test_the_largest_feature_has_room_on_either_side(size: float) -> None:
    s = size * torch.randn(3, 200, dtype=torch.float64)
    m, decay, last = running_scale(s)
    largest = s.cummax(-1).values
    assert (largest - m).min() >= -14 and (largest - m).max() < 10
    assert torch.equal(last, largest[:, -1:])
    shares = torch.zeros_like(m[:, 1:]) if decay is None else decay[:, 1:]
    assert torch.equal(shares, m[:, :-1] - m[:, 1:])


def test_nothing_decays_where_scales_are_moderate() -> None:
    s = torch.randn(3, 200)
    assert running_scale(s)[1] is None
    assert running_scale(s + 90)[1] is None
    assert running_scale(s, None, torch.full((3, 1), -100.0))[1] is not None
    assert running_scale(torch.full((3, 200), -torch.inf))[1] is None
    assert running_scale(s[:, :1])[1] is None


def test_short_sequences_have_a_decay_always() -> None:
    """Whether there is one chooses the backend: no later key may have a part in that."""
    for n in (2, SHORT):
        decay = running_scale(torch.randn(3, n))[1]
        assert decay is not None and not decay.any()


def test_under_vmap_scales_are_the_same() -> None:
    s = 100 * torch.randn(4, 2, 50)
    m, decay, last = torch.func.vmap(running_scale)(s)
    for i, row in enumerate(s):
        expected = running_scale(row)
        assert all(torch.equal(x[i], y) for x, y in zip((m, decay, last), expected, strict=True))
