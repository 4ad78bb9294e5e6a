"""The laws of the short causal convolution: torch's own is its definition."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from linattn.ops import convolution
from linattn.ops.convolution import CONVOLUTION, ConvolutionCall, short_convolution
from tests.laws import LENGTHS


def inputs(n: int, width: int, lead: tuple[int, ...] = (2,)) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(*lead, n, 3, dtype=torch.float64), torch.randn(*(1,) * len(lead), width, 3).double()
    return x.requires_grad_(), weight.requires_grad_()


def expected(x: Tensor, weight: Tensor) -> Tensor:
    width = weight.shape[-2]
    return F.conv1d(F.pad(x.mT, (width - 1, 0)), weight[0].mT.unsqueeze(1), groups=3).mT


@pytest.mark.parametrize("backend", CONVOLUTION.run)
@pytest.mark.parametrize("n", [n for n in LENGTHS if n])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("block", [1, 2**18])
def test_outputs_and_gradients_agree_with_torch(
    monkeypatch: pytest.MonkeyPatch, backend: str, n: int, width: int, block: int
) -> None:
    monkeypatch.setattr(convolution, "BLOCK", block)
    given = inputs(n, width)
    call = ConvolutionCall(*given)
    y, exact = CONVOLUTION.choose(call, backend)(call)[0], expected(*given)
    assert_close(y, exact)
    upstream = torch.randn_like(y)
    assert_close(torch.autograd.grad(y, given, upstream), torch.autograd.grad(exact, given, upstream))


def test_no_tokens() -> None:
    given = inputs(0, 4)
    assert short_convolution(*given).shape == (2, 0, 3)
    assert torch.autograd.grad(short_convolution(*given).sum(), given[1])[0].eq(0).all()


def test_permuted_and_strided_inputs() -> None:
    x, weight = inputs(10, 4, (1,))
    strided = x.detach().mT.contiguous().mT.requires_grad_()
    assert_close(short_convolution(strided, weight), expected(x, weight))
    found = torch.autograd.grad(short_convolution(strided, weight).square().sum(), strided)
    assert_close(found, torch.autograd.grad(expected(x, weight).square().sum(), x))


def test_derivatives_of_any_order() -> None:
    given = inputs(6, 4)
    assert torch.autograd.gradcheck(short_convolution, given)
    assert torch.autograd.gradgradcheck(short_convolution, given)


def test_vmap_is_a_loop() -> None:
    x, weight = inputs(6, 3, (2, 1))
    with torch.no_grad():
        found = torch.vmap(short_convolution, in_dims=(0, None))(x, weight[0])
        assert_close(found, torch.stack([short_convolution(each, weight[0]) for each in x]))
