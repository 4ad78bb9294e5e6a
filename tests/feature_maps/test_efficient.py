import torch
from torch.testing import assert_close

from linattn.feature_maps import EfficientFeatureMap
from linattn.ops.linear import causal_linear_attention


def test_efficient_attention_is_a_softmax_over_channels_and_one_over_tokens():
    q, k, v = torch.randn(3, 2, 65, 8, dtype=torch.float64)
    feature_map = EfficientFeatureMap()
    phi_q, phi_k = feature_map.query(q).value(), feature_map.key(k).value()
    y, _ = causal_linear_attention(phi_q, phi_k, v, normalize=feature_map.normalize, backend="reference")
    assert_close(y[:, -1], (q[:, -1:].softmax(-1) @ (k.softmax(-2).mT @ v)).squeeze(-2))
