"""The laws of the short causal convolution: torch's own is its definition."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from linattn.ops import convolution
from linattn.ops.convolution import CONVOLUTION, ConvolutionCall, short_convolution
from tests.laws import LENGTHS


def inputs(n: int, width: int, lead: tuple[int, ...] = (2,)) -> tuple[Tensor, ...]:
    """Return inputs, weights, a bias and a past."""
    one = (1,) * len(lead)
    shapes = (*lead, n, 3), (*one, width, 3), (*one, 3), (*lead, width - 1, 3)
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None = None, past: Tensor | None = None) -> Tensor:
    width = weight.shape[-2]
    x = F.pad(x, (0, 0, width - 1, 0)) if past is None else torch.cat([past, x], -2)
    return F.conv1d(x.mT, weight[0].mT.unsqueeze(1), None if bias is None else bias[0], groups=3).mT


@pytest.mark.parametrize("backend", CONVOLUTION.run)
@pytest.mark.parametrize("n", [n for n in LENGTHS if n])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("block", [1, 2**18])
@pytest.mark.parametrize("count", [2, 4])
def test_outputs_and_gradients_agree_with_torch(
    monkeypatch: pytest.MonkeyPatch, backend: str, n: int, width: int, block: int, count: int
) -> None:
    if backend == "one_token" and n > 1:
        return
    monkeypatch.setattr(convolution, "BLOCK", block)
    given = inputs(n, width)[:count]
    call = ConvolutionCall(*given)
    y, exact = CONVOLUTION.choose(call, backend)(call)[0], expected(*given)
    assert_close(y, exact)
    upstream = torch.randn_like(y)
    assert_close(torch.autograd.grad(y, given, upstream), torch.autograd.grad(exact, given, upstream))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_half_precision_do_not_stagnate(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Values with a mean add up to thousands; blocks of 10 tokens make 400 additions."""
    monkeypatch.setattr(convolution, "BLOCK", 60)
    halves = [(1 + x).detach().to(dtype).requires_grad_() for x in inputs(4000, 4)]
    exact = [x.detach().double().requires_grad_() for x in halves]
    upstream = torch.randn(2, 4000, 3).to(dtype)
    found = torch.autograd.grad(short_convolution(*halves), halves, upstream)
    for x, y in zip(found, torch.autograd.grad(expected(*exact), exact, upstream.double()), strict=True):
        assert (x.double() - y).norm() < 0.01 * y.norm()


def test_no_tokens() -> None:
    given = inputs(0, 4)
    assert short_convolution(*given).shape == (2, 0, 3)
    assert torch.autograd.grad(short_convolution(*given).sum(), given[1])[0].eq(0).all()


def test_permuted_and_strided_inputs() -> None:
    x, weight, *_ = inputs(10, 4, (1,))
    strided = x.detach().mT.contiguous().mT.requires_grad_()
    assert_close(short_convolution(strided, weight), expected(x, weight))
    found = torch.autograd.grad(short_convolution(strided, weight).square().sum(), strided)
    assert_close(found, torch.autograd.grad(expected(x, weight).square().sum(), x))


def test_derivatives_of_any_order() -> None:
    for n in (1, 2, 6):
        given = inputs(n, 4)
        assert torch.autograd.gradcheck(short_convolution, given)
        assert torch.autograd.gradgradcheck(short_convolution, given, fast_mode=True)


def test_vmap_is_a_loop() -> None:
    x, weight, *_ = inputs(6, 3, (2, 1))
    with torch.no_grad():
        found = torch.vmap(short_convolution, in_dims=(0, None))(x, weight[0])
        assert_close(found, torch.stack([short_convolution(each, weight[0]) for each in x]))
