"""Exported for any length. For one length, see tests/ops/test_transforms.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from linattn.models import LanguageModel, LanguageModelConfig
from tests.laws import tokens
from tests.operators import causal, decaying, over_all

LENGTH = torch.export.Dim("n", min=2, max=100_000)


@pytest.mark.parametrize("operator", [causal, over_all, decaying])
@pytest.mark.parametrize("grad", [False, True])
def test_the_operator(operator: Callable[..., Tensor], grad: bool) -> None:
    class Module(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return operator(q, k, v)

    inputs = tuple(x.requires_grad_(grad) for x in tokens(70))
    exported = torch.export.export(Module(), inputs, dynamic_shapes=[{2: LENGTH}] * 3)
    for length in (2, 70, 600, 3001):
        others = [x.requires_grad_() for x in tokens(length)]
        y, expected = exported.module()(*others), operator(*others)
        assert_close(y, expected)
        upstream = torch.randn_like(y)
        assert_close(torch.autograd.grad(y, others, upstream), torch.autograd.grad(expected, others, upstream))


@pytest.mark.parametrize("operator", [causal, over_all])
def test_autocast_does_not_round_what_was_exported(operator: Callable[..., Tensor]) -> None:
    class Module(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return operator(q, k, v)

    inputs = tokens(70, dtype=torch.float32)
    exported = torch.export.export(Module(), inputs, dynamic_shapes=[{2: LENGTH}] * 3).module()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = exported(*inputs)
    assert_close(y, operator(*inputs))


@pytest.mark.parametrize("attention", ["elu", "efficient", "favor", "softmax"])
def test_a_language_model(attention: str) -> None:
    model = LanguageModel(LanguageModelConfig(vocab_size=50, dim=16, depth=2, num_heads=2, attention=attention)).eval()
    exported = torch.export.export(model, (torch.randint(50, (1, 70)),), dynamic_shapes=[{1: LENGTH}])
    for length in (2, 70, 600):
        text = torch.randint(50, (1, length))
        assert_close(exported.module()(text), model(text))
