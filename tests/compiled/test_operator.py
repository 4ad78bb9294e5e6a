"""A record's operator in a graph: one node, of any size, with gradients."""

import pytest
import torch
from torch.testing import assert_close

from linattn.ops.library import NAMESPACE
from tests.ops.test_operator import inputs, toy, toy_definition

OPERATORS = getattr(torch.ops, NAMESPACE)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_one_graph(weighted: bool, dynamic: bool | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(toy, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (4, 3, 2):
        tensors = inputs(weighted, n)
        y, expected = compiled(*tensors), toy_definition(*tensors)
        assert_close(y, expected)
        upstream = torch.randn_like(y)
        assert_close(torch.autograd.grad(y, tensors, upstream), torch.autograd.grad(expected, tensors, upstream))


@pytest.mark.parametrize("weighted", [True, False])
def test_its_shapes_are_those_of_the_tracer(weighted: bool) -> None:
    x, *weight = inputs(weighted)
    call = (x, weight[0] if weight else None, 3)
    for save in (True, False):
        torch.library.opcheck(OPERATORS.toy_quick.default, (*call, save))
    call = (x.detach(), weight[0].detach() if weight else None, 3)
    y, total = OPERATORS.toy_quick(*call, True)
    torch.library.opcheck(OPERATORS.toy_quick_gradient.default, (torch.randn_like(y), total, *call))
