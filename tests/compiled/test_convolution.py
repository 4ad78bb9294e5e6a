"""The short convolution is one operation of a graph, and torch's own operators in exports."""

import torch
from torch.testing import assert_close

from linattn.ops.convolution import short_convolution
from linattn.ops.library import NAMESPACE


def inputs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(2, n, 3, dtype=torch.float64), torch.randn(1, 4, 3, dtype=torch.float64)
    return x.requires_grad_(), weight.requires_grad_()


def test_one_graph() -> None:
    torch._dynamo.reset()
    given = inputs(10)
    found, expected = (f(*given) for f in (torch.compile(short_convolution, backend="aot_eager"), short_convolution))
    assert_close(found, expected)
    upstream = torch.randn_like(expected)
    assert_close(*(torch.autograd.grad(y, given, upstream) for y in (found, expected)))
    library = getattr(torch.ops, NAMESPACE)
    torch.library.opcheck(library.convolution_blocks.default, (*given, False))
    torch.library.opcheck(library.convolution_blocks_gradient.default, (upstream, *(x.detach() for x in given)))


class Convolution(torch.nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return short_convolution(x, weight)


def test_export_of_any_length() -> None:
    lengths = {"x": {1: torch.export.Dim("n", min=2, max=100)}, "weight": None}
    with torch.no_grad():
        graph = torch.export.export(Convolution(), inputs(10), dynamic_shapes=lengths).module()
        for n in (2, 7, 33):
            given = inputs(n)
            assert_close(graph(*given), short_convolution(*given))
