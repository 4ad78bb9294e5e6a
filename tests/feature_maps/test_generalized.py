import pytest
import torch
from torch.testing import assert_close

from linattn.feature_maps import FEATURE_MAPS, GeneralizedFeatureMap, RandomProjection, redraw_features_


def test_any_kernel_with_its_epsilon():
    x = torch.randn(2, 65, 9, dtype=torch.float64)
    feature_map = GeneralizedFeatureMap(torch.tanh, epsilon=0.25)
    assert_close(feature_map.query(x).value(), x.tanh() + 0.25)
    assert_close(feature_map.key(x).value(), x.tanh() + 0.25)
    assert_close(GeneralizedFeatureMap(torch.cos).key(x).value(), x.cos())


def test_projected():
    x = torch.randn(2, 65, 9, dtype=torch.float64)
    projection = RandomProjection(9, 20)
    feature_map = GeneralizedFeatureMap(torch.relu, epsilon=1e-3, projection=projection)
    expected = (x / 9**0.25 @ projection.rows.double().mT).clamp(min=0) + 1e-3
    assert_close(feature_map.query(x).value(), expected)


def test_a_kernel_may_learn():
    kernel = torch.nn.PReLU()
    assert list(GeneralizedFeatureMap(kernel).parameters()) == list(kernel.parameters())


def test_relu_of_a_projection_estimates_the_arc_cosine_kernel():
    """E relu(ω·x) relu(ω·y) = ‖x‖‖y‖ (sin θ + (π − θ) cos θ) / 2π. Cho and Saul, Kernel methods for deep learning"""
    x = torch.tensor([[1.0, 0, 0, 0], [0.6, 0.8, 0, 0], [0, 0, 2, 0], [-1, 0, 0, 0]], dtype=torch.float64)
    feature_map = GeneralizedFeatureMap(torch.relu, projection=RandomProjection(4, 40_000).double())
    # the projection divides both by d^¼
    similarity = 2 * feature_map.query(x).value() @ feature_map.key(x).value().mT / 40_000
    norm = x.norm(dim=-1)
    angle = (x @ x.mT / norm.outer(norm)).clamp(-1, 1).acos()
    expected = norm.outer(norm) * (angle.sin() + (torch.pi - angle) * angle.cos()) / (2 * torch.pi)
    assert_close(similarity, expected, rtol=0, atol=0.08)


def test_redraw():
    feature_map = FEATURE_MAPS["favor_relu"](8, 1, 1)
    x = torch.randn(5, 8)
    before = feature_map.query(x).value()
    redraw_features_(feature_map)
    assert not torch.equal(feature_map.query(x).value(), before)
    redraw_features_(GeneralizedFeatureMap(torch.relu))


def test_a_negative_epsilon_is_refused():
    with pytest.raises(ValueError, match=r"epsilon.*-0\.1"):
        GeneralizedFeatureMap(torch.relu, epsilon=-0.1)
