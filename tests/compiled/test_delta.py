"""The delta rule compiles without breaks, in graphs that serve other lengths, and exports for one length and any."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize
from torch.testing import assert_close

from linattn.ops import causal_delta_attention


def inputs(n: int) -> list[Tensor]:
    shapes = (2, 3, n, 8), (2, 3, n, 8), (2, 3, n, 4), (2, 3, n), (2, 3, 8, 4), (2, 3, n, 8), (2, 3, n, 8)
    q, k, v, beta, S, log_decay, removal = (torch.randn(shape) for shape in shapes)
    k = normalize(k, dim=-1)
    removal = normalize(k + 0.3 * removal, dim=-1)
    return [x.requires_grad_() for x in (q, k, v, beta.sigmoid(), S, -log_decay.exp(), removal)]


def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
    return causal_delta_attention(*x[:5], log_decay=x[5], removal_key=x[6], scale=0.3)


def derivatives(run: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    y, S = run(*tensors)
    return y, S, *torch.autograd.grad(y.square().sum() + S.square().sum(), tensors)


def test_a_graph_serves_other_lengths_with_gradients() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for n in (70, 128, 200, 300, 3000):
        tensors = inputs(n)
        assert_close(derivatives(compiled, tensors), derivatives(attend, tensors))
    # torch makes another graph where a sequence has a single segment
    assert counter.frame_count == 2


class Layer(torch.nn.Module):
    def forward(self, *x: Tensor) -> tuple[Tensor, Tensor]:
        return attend(*x)


@pytest.mark.parametrize("n", [1, 9])
def test_exports_for_one_length(n: int) -> None:
    tensors = inputs(n)
    exported = torch.export.export(Layer(), tuple(tensors)).module()
    assert_close(derivatives(exported, tensors), derivatives(attend, tensors))


# with a decay per head and with none, as attentions in test_export.py
def test_exports_for_any_length_in_torchs_own_operators() -> None:
    layer, n = Layer(), torch.export.Dim("n", min=2, max=100_000)
    sizes = (({2: n},) * 4 + ({}, {2: n}, {2: n}),)
    program = torch.export.export(layer, tuple(x.detach() for x in inputs(70)), dynamic_shapes=sizes)
    assert not any("linattn" in str(node.target) for node in program.graph.nodes)
    for length in (2, 16, 129, 3000):
        tensors = inputs(length)
        upstream = [torch.randn_like(x) for x in layer(*tensors)]
        found, expected = program.module()(*tensors), layer(*tensors)
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
        gradients = [torch.autograd.grad(x, tensors, upstream, materialize_grads=True) for x in (found, expected)]
        assert_close(*gradients, rtol=1e-4, atol=1e-4)
