import pytest
import torch
from torch.testing import assert_close

from linattn.feature_maps import HedgehogFeatureMap, T2RFeatureMap


def test_t2r_closed_form():
    feature_map = T2RFeatureMap(6, 4, num_key_heads=2, num_features=5).double()
    q, k = torch.randn(3, 4, 65, 6, dtype=torch.float64), torch.randn(3, 2, 65, 6, dtype=torch.float64)
    for x, linear, features in (
        (q, feature_map.query_linear, feature_map.query(q).value()),
        (k, feature_map.key_linear, feature_map.key(k).value()),
    ):
        assert linear.weight.shape == (x.shape[1], 6, 5) and linear.bias.shape == (x.shape[1], 1, 5)
        for head in range(x.shape[1]):
            expected = (x[:, head] @ linear.weight[head] + linear.bias[head]).clamp(min=0)
            assert_close(features[:, head], expected)


def test_t2r_begins_as_linear_layers_do():
    feature_map = T2RFeatureMap(64, 8)
    for parameter in feature_map.parameters():
        assert parameter.abs().max() <= 1 / 8
    assert abs(feature_map.query_linear.weight.std().item() * 8 * 3**0.5 - 1) < 0.05
    assert not torch.equal(feature_map.query_linear.weight, feature_map.key_linear.weight)


def test_hedgehog_closed_form():
    feature_map = HedgehogFeatureMap(6, 4, num_key_heads=2).double()
    torch.nn.init.normal_(feature_map.query_linear.weight)
    q = torch.randn(3, 4, 65, 6, dtype=torch.float64)
    for head in range(4):
        y = q[:, head] @ feature_map.query_linear.weight[head]
        both = torch.cat([y.exp(), (-y).exp()], dim=-1)
        assert_close(feature_map.query(q).value()[:, head], both / both.sum(-1, keepdim=True))


def test_hedgehog_begins_as_the_identity():
    feature_map = HedgehogFeatureMap(6, 4, num_key_heads=2).double()
    k = torch.randn(3, 2, 65, 6, dtype=torch.float64)
    assert_close(feature_map.key(k).value(), torch.cat([k, -k], dim=-1).softmax(-1))


@pytest.mark.parametrize("cls", [T2RFeatureMap, HedgehogFeatureMap])
def test_heads_must_fit(cls):
    feature_map = cls(6, 4, num_key_heads=2)
    with pytest.raises(ValueError, match=r"\(\.\.\., 2, n, 6\).* is \(1, 4, 5, 6\)"):
        feature_map.key(torch.randn(1, 4, 5, 6))
    with pytest.raises(ValueError, match=r"\(\.\.\., 4, n, 6\).* is \(1, 1, 5, 6\)"):
        feature_map.query(torch.randn(1, 1, 5, 6))
