import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad
from torch.testing import assert_close

from linattn.feature_maps import SecondOrderTaylorFeatureMap, TaylorFeatureMap


def test_first_order_closed_form():
    q, k = torch.randn(2, 3, 65, 7, dtype=torch.float64)
    similarity = TaylorFeatureMap().query(q).value() @ TaylorFeatureMap().key(k).value().mT
    assert_close(similarity, 1 + F.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_zero_vector_stays_zero(dtype):
    x = torch.randn(3, 8).to(dtype)
    x[1] = 0
    x.requires_grad_()
    features = TaylorFeatureMap().key(x).value()
    assert features[1].tolist() == [1] + [0] * 8
    features.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and (x.grad[1] == 0).all()


@pytest.mark.parametrize("hessian", [torch.autograd.functional.hessian, lambda f, x: torch.func.jacrev(grad(f))(x)])
def test_second_derivatives_at_a_zero_vector_are_finite(hessian):
    """And those of other vectors are as without it."""
    x = torch.randn(3, 4, dtype=torch.float64)
    with_zero = x.index_fill(0, torch.tensor(1), 0)
    found = hessian(lambda x: TaylorFeatureMap().key(x).value().pow(3).sum(), with_zero)
    expected = hessian(lambda x: (x / x.square().sum(-1, True).sqrt()).pow(3).sum(), x[::2])
    assert found.isfinite().all()
    assert_close(found[::2, :, ::2], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_short_and_long_vectors_have_unit_length(dtype):
    direction = torch.tensor([0.6, 0.8, 0, 0])
    for length in (1e-3, 1, 1e3):
        features = TaylorFeatureMap().key((direction * length).to(dtype).unsqueeze(0)).value()
        assert_close(features[0, 1:].float(), direction, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 8, 15, 16, 33])
def test_second_order_closed_form(d):
    q, k = torch.randn(2, 3, 65, d, dtype=torch.float64)
    phi = SecondOrderTaylorFeatureMap()
    s = q @ k.mT / math.sqrt(d)
    assert_close(phi.query(q).value() @ phi.key(k).value().mT, 1 + s + s**2 / 2)
    assert phi.query(q).x.shape[-1] == 1 + d + d * (d + 1) // 2


def test_second_order_is_close_to_exp_for_short_vectors():
    q, k = torch.randn(2, 65, 16, dtype=torch.float64) * 0.3
    phi = SecondOrderTaylorFeatureMap()
    s = q @ k.mT / 4
    similarity = phi.query(q).value() @ phi.key(k).value().mT
    assert ((similarity - s.exp()).abs() <= s.abs() ** 3 / 6 * s.abs().exp() + 1e-12).all()
