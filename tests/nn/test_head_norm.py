import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.nn import HeadNorm


def test_is_rms_norm():
    module, x = HeadNorm(6).double(), torch.randn(2, 3, 5, 6, dtype=torch.float64)
    nn.init.normal_(module.weight)
    assert_close(module(x), nn.functional.rms_norm(x, (6,), module.weight, eps=0))


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_heads_may_be_scaled(scale):
    module, x = HeadNorm(6), torch.randn(2, 3, 6)
    assert_close(module(x * scale), module(x))


def test_zeros_stay_zeros_and_have_no_gradient():
    for dtype in (torch.float32, torch.float16):
        module, x = HeadNorm(6).to(dtype), torch.zeros(2, 6, dtype=dtype, requires_grad=True)
        y = module(x)
        y.sum().backward()
        assert y.count_nonzero() == 0 and x.grad.isfinite().all() and module.weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    module, x = HeadNorm(6).to(dtype), (torch.randn(50, 6) * 1e-4).to(dtype)
    assert module(x).dtype == dtype
    assert_close(module(x).double(), HeadNorm(6).double()(x.double()), rtol=1e-2, atol=1e-3)


def test_gradients_are_right():
    module, x = HeadNorm(6).double(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(module, {"weight": weight}, (x,)), (x, module.weight)
    )
    torch.autograd.gradgradcheck(module, (x,))
