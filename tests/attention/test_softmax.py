import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from linattn.attention import SoftmaxAttention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dv", [4, 7])
def test_is_torchs(causal, dv):
    q, k, v = torch.randn(2, 6, 33, 5), torch.randn(2, 3, 33, 5), torch.randn(2, 3, 33, dv)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert_close(SoftmaxAttention(causal=causal)(q, k, v), expected)


def test_masked_queries_still_see_the_keys_unless_causal():
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    key_mask = torch.arange(9)[None, None] < 5
    y = SoftmaxAttention()(q, k, v, key_mask=key_mask)
    assert_close(y, F.scaled_dot_product_attention(q, k[..., :5, :], v[..., :5, :]))
    assert not SoftmaxAttention(causal=True)(q, k, v, key_mask=key_mask)[..., 5:, :].any()


def test_a_mask_may_come_after_a_past_without_one_and_the_other_way_round():
    inner, x = SoftmaxAttention(causal=True), [torch.randn(2, 2, 9, 4) for _ in range(3)]
    for masked in (slice(0, 4), slice(4, 9)):
        key_mask = torch.ones(2, 2, 9, dtype=torch.bool)
        key_mask[..., masked] = torch.rand(2, 2, key_mask[..., masked].shape[-1]) < 0.5
        state, ys = None, []
        for piece in (slice(0, 4), slice(4, 9)):
            mask = key_mask[..., piece] if piece == masked else None
            y, state = inner.extend(*(t[..., piece, :] for t in x), state, key_mask=mask)
            ys.append(y)
        assert_close(torch.cat(ys, -2), inner(*x, key_mask=key_mask))


def test_causal_with_more_keys_than_queries_is_an_error():
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4)
    with pytest.raises(ValueError, match="as many queries as keys"):
        SoftmaxAttention(causal=True)(q, k, k)
