import torch
from torch.testing import assert_close

from linattn.feature_maps import EfficientFeatureMap, ExpFeatureMap
from linattn.ops.linear import causal_linear_attention


def test_exp():
    x = torch.randn(3, 65, 5, dtype=torch.float64)
    assert_close(ExpFeatureMap().query(x), x.exp())
    assert_close(ExpFeatureMap().key(x), x.exp())


def test_the_largest_value_is_one():
    value, log_scale = ExpFeatureMap().scaled_key(torch.randn(3, 65, 5) * 100)
    assert_close(value.amax(-1), torch.ones(3, 65))
    assert log_scale.max() > 100


def test_efficient_attention_is_a_softmax_over_channels_and_one_over_tokens():
    q, k, v = torch.randn(3, 2, 65, 8, dtype=torch.float64)
    feature_map = EfficientFeatureMap()
    y, _ = causal_linear_attention(
        feature_map.query(q), feature_map.key(k), v, normalize=feature_map.normalize, backend="reference"
    )
    assert_close(y[:, -1], (q[:, -1:].softmax(-1) @ (k.softmax(-2).mT @ v)).squeeze(-2))
