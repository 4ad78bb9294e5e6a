"""The laws of `Features`: every way to read them gives the same numbers, in range where the formula leaves it."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.feature_maps import Features
from linattn.ops.elementwise import ELEMENTWISE
from tests.feature_maps.test_elementwise import FORMULAS

every_function = pytest.mark.parametrize("function", ELEMENTWISE)
with_and_without_scale = pytest.mark.parametrize("scaled", [False, True])


def features(function: str, scaled: bool, *, std: float = 1.0, dtype: torch.dtype = torch.float64) -> Features:
    x = torch.randn(2, 63, 5, dtype=torch.float64) * std
    scale = (torch.randn(2, 63) * std).to(torch.promote_types(dtype, torch.float32)) if scaled else None
    return Features(x.to(dtype), scale, function)


def formula(x: Tensor, log_scale: Tensor | None, function: str) -> Tensor:
    y = FORMULAS[function](x)
    return y if log_scale is None else y * torch.e ** log_scale.unsqueeze(-1)


@every_function
@with_and_without_scale
def test_every_form_has_the_same_value(function, scaled):
    original = features(function, scaled)
    expected = formula(*original)
    assert_close(original.value(), expected)
    for form in (original.evaluated(), original.with_negative_exponents()):
        assert_close(formula(*form), expected)
    assert original.evaluated().function == "identity"


@every_function
def test_relative_features_are_divided(function):
    original, log_size = features(function, scaled=True), torch.randn(2, 63, dtype=torch.float64)
    scalable = original.scalable()
    relative = Features(scalable.relative_to(log_size), log_size, scalable.function)
    assert_close(formula(*relative), formula(*original))
    assert original.relative_to(None) is original.x


@with_and_without_scale
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_exponential_is_one(scaled, dtype):
    original = features("exp", scaled, std=100, dtype=dtype)
    value, log_scale, _ = original.evaluated()
    assert_close(value.amax(-1), torch.ones(2, 63), check_dtype=False)
    assert log_scale is not None and log_scale.max() > 100 and torch.equal(original.log_size(), log_scale)


@every_function
@with_and_without_scale
def test_float16_becomes_float32(function, scaled):
    original = features(function, scaled, std=1000 if function == "squared_relu" else 1, dtype=torch.float16)
    value = original.value()
    assert value.dtype == torch.float32
    if not scaled:
        assert_close(value.double(), formula(original.x.double(), None, function), rtol=1e-5, atol=1e-5)


@every_function
@with_and_without_scale
def test_gradients_are_those_of_the_formula(function, scaled):
    x, log_scale, _ = features(function, scaled)
    inputs = [x.requires_grad_()] if log_scale is None else [x.requires_grad_(), log_scale.double().requires_grad_()]
    weight = torch.randn_like(x)

    def gradients(value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((weight * value).sum(), inputs)

    original = Features(inputs[0], inputs[1] if scaled else None, function)
    assert_close(gradients(original.value()), gradients(formula(*original)))
