"""The Taylor paper's two attentions on images: by their formulas, on non-square images, with pixels of zeros (B12)."""

import pytest
import torch
from torch.testing import assert_close

from linattn import ChannelLinearAttention, PositionLinearAttention

SIZES = [(6, 11), (8, 1), (1, 5), (4, 4)]


def opened(attention):
    """γ is zero at first, which would hide everything."""
    attention = attention.double()
    torch.nn.init.constant_(attention.gamma, 0.7)
    return attention


def image(h, w, chan=16, b=2):
    return torch.randn(b, chan, h, w, dtype=torch.float64)


def taylor(q, k, v):
    """Rows are what attends: weights 1 + cos, normalised."""
    weights = 1 + torch.nn.functional.cosine_similarity(q.unsqueeze(2), k.unsqueeze(1), dim=-1)
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_position_attention_is_the_papers_formula(size):
    attention, x = opened(PositionLinearAttention(16)), image(*size)
    q, k, v = (c(x).flatten(2).mT for c in (attention.query_conv, attention.key_conv, attention.value_conv))
    y = attention(x)
    assert_close(y, x + 0.7 * taylor(q, k, v).mT.view_as(x))
    assert_close(attention(x.mT), y.mT)
    # the module is made as the original is
    assert attention.query_conv.out_channels == 2
    assert PositionLinearAttention(4).query_conv.out_channels == 1


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_channel_attention_is_the_papers_formula(size):
    attention, x = opened(ChannelLinearAttention()), image(*size)
    flat = x.flatten(2)
    assert_close(attention(x), x + 0.7 * taylor(flat, flat, flat).view_as(x))


@pytest.mark.parametrize(
    "make", [lambda: PositionLinearAttention(16), ChannelLinearAttention], ids=["position", "channel"]
)
def test_laws(make):
    attention, x = opened(make()), image(6, 11)
    y = attention(x)
    assert_close(attention(x[1:]), y[1:])
    assert torch.autograd.gradcheck(
        attention, image(2, 3, chan=8 if make is ChannelLinearAttention else 16).requires_grad_(), fast_mode=True
    )
    # at first, nothing is added
    assert_close(make().double()(x), x, rtol=0, atol=0)
    # pixels and channels of zeros
    x[0, :, 2, 3], x[1, 4] = 0, 0
    x.requires_grad_()
    y = attention(x)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize(
    "make", [lambda: PositionLinearAttention(16), ChannelLinearAttention], ids=["position", "channel"]
)
def test_padding_and_neighbours_change_nothing(make):
    attention, sizes = opened(make()), [(8, 12), (5, 12), (7, 4)]
    x = 1e6 * image(8, 12, b=3)
    mask = torch.zeros(3, 8, 12, dtype=torch.bool)
    for row, (h, w) in enumerate(sizes):
        x[row, :, :h, :w], mask[row, :h, :w] = torch.randn(16, h, w), True
    y = attention(x, mask=mask)
    for row, (h, w) in enumerate(sizes):
        one = slice(row, row + 1)
        assert_close(y[one, :, :h, :w], attention(x[one, :, :h, :w]))
    outside = ~mask.unsqueeze(1).expand_as(x)
    assert torch.equal(y[outside], x[outside])
