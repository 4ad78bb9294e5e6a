import pytest
import torch
from torch import Tensor

from linattn.attention import LocalAttention, SoftmaxAttention, SplitHeads


def some_heads(h: int = 6, hk: int = 3, n: int = 9) -> list[Tensor]:
    return [torch.randn(2, heads, n, 4) for heads in (h, hk, hk)]


def test_each_part_has_its_own_heads():
    local, full = LocalAttention(2, causal=True), SoftmaxAttention(causal=True)
    q, k, v = some_heads()
    y = SplitHeads((4, local), (2, full))(q, k, v)
    assert torch.equal(y[:, :4], local(q[:, :4], k[:, :2], v[:, :2]))
    assert torch.equal(y[:, 4:], full(q[:, 4:], k[:, 2:], v[:, 2:]))


def test_a_mixture_may_hold_mixtures():
    inner = SplitHeads((4, SplitHeads((2, LocalAttention(2)), (2, SoftmaxAttention()))), (2, LocalAttention(3)))
    assert inner(*some_heads()).shape == (2, 6, 9, 4)


def test_errors_say_the_counts():
    causal, full = SoftmaxAttention(causal=True), SoftmaxAttention()
    for parts in ((), ((0, full),)):
        with pytest.raises(ValueError, match=r"parts must be pairs|heads must be a whole number of at least 1"):
            SplitHeads(*parts)
    with pytest.raises(ValueError, match=r"causal=True.*causal=False"):
        SplitHeads((2, causal), (2, full))
    with pytest.raises(ValueError, match=r"\(3, 2\), together 5 heads, but there are 6"):
        SplitHeads((3, full), (2, full))(*some_heads())
    with pytest.raises(ValueError, match=r"\(3, 3\), but there are 3"):
        SplitHeads((3, full), (3, full))(*some_heads())
