"""The running maximum against an exact log-sum-exp, at sizes of which the exponential overflows any dtype."""

import pytest
import torch
from torch.testing import assert_close

from linattn.ops import causal_linear_attention
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
    s = 10 * torch.randn(2, 80)
    log_decay = -torch.rand(2, 80) if decaying else None
    whole, _, end = running_scale(s, log_decay)
    start, pieces = None, []
    for part in (slice(0, 1), slice(1, 1), slice(1, 33), slice(33, 80)):
        m, _, start = running_scale(s[:, part], None if log_decay is None else log_decay[:, part], start)
        pieces.append(m)
    assert_close(torch.cat(pieces, -1), whole, rtol=1e-6, atol=1e-6 if decaying else 0)
    assert_close(start, end, rtol=1e-6, atol=1e-6 if decaying else 0)


def test_no_key_yet_is_no_scale() -> None:
    s = torch.tensor([[-torch.inf, -torch.inf, 5.0, -torch.inf, 7.0]])
    m, decay, last = running_scale(s)
    assert m.tolist() == [[0, 0, 5, 5, 7]] and decay.tolist() == [[0, 0, 0, 0, -2]] and last.tolist() == [[7]]
