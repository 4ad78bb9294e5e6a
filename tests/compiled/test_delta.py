"""The delta rule compiles without breaks, in graphs that serve other lengths, and exports for one length."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize
from torch.testing import assert_close

from linattn.ops import causal_delta_attention


def inputs(n: int) -> list[Tensor]:
    shapes = (2, 3, n, 8), (2, 3, n, 8), (2, 3, n, 4), (2, 3, n), (2, 3, 8, 4), (2, 3, n, 8)
    q, k, v, beta, S, log_decay = (torch.randn(shape) for shape in shapes)
    return [x.requires_grad_() for x in (q, normalize(k, dim=-1), v, beta.sigmoid(), S, -log_decay.exp())]


def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
    return causal_delta_attention(*x[:5], log_decay=x[5])


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


@pytest.mark.parametrize("n", [1, 9])
def test_exports_for_one_length(n: int) -> None:
    tensors = tuple(x.detach() for x in inputs(n))

    class Layer(torch.nn.Module):
        def forward(self, *x: Tensor) -> tuple[Tensor, Tensor]:
            return attend(*x)

    exported = torch.export.export(Layer(), tensors)
    assert_close(exported.module()(*tensors), attend(*tensors))


def test_an_export_for_every_length_is_refused_by_name() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
            return causal_delta_attention(q, k, v, beta)

    n = torch.export.Dim("n", min=4, max=100)
    sizes = {"q": {2: n}, "k": {2: n}, "v": {2: n}, "beta": {2: n}}
    with pytest.raises(Exception, match="causal_delta_attention can be exported for one length only"):
        torch.export.export(Layer(), tuple(x.detach() for x in inputs(9)[:4]), dynamic_shapes=sizes)
