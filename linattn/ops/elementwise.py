"""Elementwise functions φ. An operator takes them by name and applies them inside its loop, which saves writing φ(q)
and φ(k) to memory; the feature maps of the same names wrap them."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Elementwise(NamedTuple):
    """A function φ(x), and its derivative as a function of y = φ(x) (None: 1), so that a backward needs no x.

    `overwrite(x, scratch)` computes φ(x) in the memory of x. It and `derivative(y, scratch)` may use `scratch`, a
    tensor of the same shape or None, so that a loop over blocks needs no new memory. `nonnegative` means φ(x) ≥ 0."""

    function: Callable[[Tensor], Tensor]
    overwrite: Callable[[Tensor, Tensor | None], Tensor]
    derivative: Callable[[Tensor, Tensor | None], Tensor] | None
    nonnegative: bool = True


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 = exp(min(x, 0)) + max(x, 0). Katharopoulos et al., https://arxiv.org/abs/2006.16236, eq. 7"""
    return x.clamp(min=0).add_(x.clamp(max=0).exp_())


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)². It has a name for pickle: feed-forwards hold it."""
    return torch.relu(x).square()


def _overwrite_with_exp(x: Tensor, _: Tensor | None = None) -> Tensor:
    # on a CPU torch's exp2 takes a tenth to a third of the time of exp, from about a thousand numbers on
    return x.mul_(math.log2(math.e)).exp2_()


def _overwrite_with_elu_plus_one(x: Tensor, scratch: Tensor | None) -> Tensor:
    exponentials = _overwrite_with_exp(torch.clamp(x, max=0, out=scratch))
    return x.clamp_(min=0).add_(exponentials)


_softplus = torch.nn.functional.softplus

ELEMENTWISE: dict[str, Elementwise] = {
    "identity": Elementwise(lambda x: x, lambda x, _: x, None, nonnegative=False),
    # for x > 0 the function is x + 1 > 1 with derivative 1; elsewhere exp(x) ≤ 1 is its own derivative
    "elu_plus_one": Elementwise(
        elu_plus_one, _overwrite_with_elu_plus_one, lambda y, scratch: torch.clamp(y, max=1, out=scratch)
    ),
    "relu": Elementwise(torch.relu, lambda x, _: x.relu_(), lambda y, _: (y > 0).to(y.dtype)),
    "squared_relu": Elementwise(squared_relu, lambda x, _: x.relu_().square_(), lambda y, _: 2 * y.sqrt()),
    "exp": Elementwise(torch.exp, _overwrite_with_exp, lambda y, _: y),
    # sigmoid(x) = 1 − exp(−softplus(x))
    "softplus": Elementwise(_softplus, lambda x, _: x.copy_(_softplus(x)), lambda y, _: -torch.expm1(-y)),
    "sigmoid": Elementwise(torch.sigmoid, lambda x, _: x.sigmoid_(), lambda y, _: y * (1 - y)),
}
SYNONYMS = {"elu": "elu_plus_one", "elu+1": "elu_plus_one"}
