"""Code that inductor generates gives the same numbers. One process runs both tests, as they share compiled headers."""

import shutil

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.testing import assert_close

from linattn.ops.plain.delta import _states
from linattn.ops.tokens.cutting import cut, join
from tests.compiled.test_models import model_of
from tests.models.causal import MODELS, some_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))), reason="no C++ compiler"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def test_a_model_and_its_gradients():
    model, tokens = model_of(MODELS["convolution"], feed_forward="none"), some_tokens(2, 20)
    expected = model(tokens)
    gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    found = torch.compile(model, fullgraph=True)(tokens)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    others = torch.autograd.grad(found.square().sum(), list(model.parameters()))
    for gradient, other in zip(gradients, others, strict=True):
        assert_close(other, gradient, rtol=1e-3, atol=1e-4)


def test_gradients_of_the_chunks_under_vmap():
    def parts(x: Tensor) -> Tensor:
        return torch.cat(
            [join(cut(x, 2), x.shape[-2]).flatten(), _states(x.unflatten(-2, (3, 2)), x[:2, 2:], 2).flatten()]
        )

    run, x = vmap(grad(lambda x: parts(x).sin().sum())), torch.randn(3, 6, 4)
    assert_close(torch.compile(run)(x), run(x))
