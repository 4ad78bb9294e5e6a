import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.nn import HeadNorm, ScaleNorm


def test_agrees_with_the_formula():
    norm, x = ScaleNorm(7).double(), torch.randn(3, 5, 7, dtype=torch.float64)
    nn.init.constant_(norm.g, 1.7)
    assert_close(norm(x), 1.7 * x / x.norm(dim=-1, keepdim=True))


def test_starts_as_a_norm_of_unit_variance():
    assert_close(ScaleNorm(64)(torch.randn(10, 64)).square().mean(-1), torch.ones(10))


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-8, 1e30])
@pytest.mark.parametrize("norm", [ScaleNorm(7), HeadNorm(7, eps=0.0)], ids=str)
def test_any_scale_gives_the_same(norm, scale):
    x = torch.randn(5, 7) * scale
    assert_close(norm(x), norm((x.double() / scale).float()))


@pytest.mark.parametrize("kind", [ScaleNorm, HeadNorm])
def test_other_numbers_of_channels_are_refused(kind, unchecked):
    for shape in ((2, 1), (2, 16), (2, 0), ()):
        with pytest.raises(ValueError, match=r"8 channels, but x is|must be"):
            kind(8)(torch.ones(shape))
    with pytest.raises(ValueError, match="must be a whole number of at least 1, but is 0"):
        kind(0)


def test_zeros_stay_zeros_and_have_a_gradient():
    norm, x = ScaleNorm(7), torch.zeros(2, 7, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 7)) and torch.isfinite(x.grad).all()


def test_gradients():
    norm = ScaleNorm(4).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, g: torch.func.functional_call(norm, {"g": g}, x), (x, norm.g))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(dtype):
    norm, x = ScaleNorm(64), 300 * torch.randn(5, 64)
    assert_close(norm(x.to(dtype)).float(), norm(x), rtol=1e-2, atol=1e-2)


def test_head_norm_is_rms_norm():
    for eps in (0.0, 1e-5, 0.3):
        module, x = HeadNorm(6, eps=eps).double(), torch.randn(2, 3, 5, 6, dtype=torch.float64)
        nn.init.normal_(module.weight)
        assert_close(module(x), nn.functional.rms_norm(x, (6,), module.weight, eps=eps))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e-3, 1e12, 1e30])
def test_an_epsilon_is_that_of_float64_at_any_scale(scale):
    module, x = HeadNorm(6), torch.randn(2, 3, 6) * scale
    assert_close(module(x).double(), HeadNorm(6).double()(x.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), "1e-5", True])
def test_epsilons_that_cannot_be_are_refused(eps, unchecked):
    with pytest.raises(ValueError, match=r"eps must be a .*number.*, but is"):
        HeadNorm(6, eps=eps)


def test_head_norm_of_zeros_has_no_gradient():
    for dtype in (torch.float32, torch.float16):
        module, x = HeadNorm(6).to(dtype), torch.zeros(2, 6, dtype=dtype, requires_grad=True)
        y = module(x)
        y.sum().backward()
        assert y.count_nonzero() == 0 and x.grad.isfinite().all() and module.weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_norm_computes_half_precision_in_float32(dtype):
    module, x = HeadNorm(6).to(dtype), (torch.randn(50, 6) * 1e-4).to(dtype)
    assert module(x).dtype == dtype
    assert_close(module(x).double(), HeadNorm(6).double()(x.double()), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_head_norm_gradients(eps):
    module, x = HeadNorm(6, eps=eps).double(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(module, {"weight": weight}, (x,)), (x, module.weight)
    )
    torch.autograd.gradgradcheck(module, (x,))
