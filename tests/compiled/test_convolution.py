"""The short convolution is one operation of a graph, and torch's own operators in exports."""

import torch
from torch.testing import assert_close

from linattn.ops.convolution import short_convolution
from linattn.ops.library import NAMESPACE


def inputs(n: int) -> tuple[torch.Tensor, ...]:
    """Return inputs, weights, a bias and a past."""
    shapes = (2, n, 3), (1, 4, 3), (1, 3), (2, 3, 3)
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


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
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return short_convolution(*tensors)


def test_export_of_any_length() -> None:
    lengths = ({1: torch.export.Dim("n", min=2, max=100)}, None, None, None)
    with torch.no_grad():
        graph = torch.export.export(Convolution(), inputs(10), dynamic_shapes=(lengths,)).module()
        for n in (2, 7, 33):
            given = inputs(n)
            assert_close(graph(*given), short_convolution(*given))
