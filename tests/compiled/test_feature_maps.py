"""Compiled in one graph, or exported for any length, feature maps give the same features and gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close

from linattn.feature_maps import FEATURE_MAPS
from tests.operators import export

Pairs = tuple[tuple[Tensor, Tensor | None], ...]


class QueriesAndKeys(nn.Module):
    """The features of queries and keys, and the logarithms of their scales."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.feature_map = FEATURE_MAPS[name](8, 4, 2).double()

    def forward(self, q: Tensor, k: Tensor) -> Pairs:
        return self.feature_map.query(q).evaluated()[:2], self.feature_map.key(k).evaluated()[:2]


def inputs(n: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, h, n, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2))


def assert_same(found: Pairs, expected: Pairs, leaves: tuple[Tensor, ...]) -> None:
    """Compare features and gradients."""
    gradients = []
    for pairs in (found, expected):
        total = sum(x.square().sum() for pair in pairs for x in pair if x is not None)
        gradients.append(torch.autograd.grad(total, leaves))
    for pair, other in zip(found, expected, strict=True):
        assert_close(pair, other)
    assert_close(*gradients)


def kind(name: str) -> tuple[type, bool]:
    """Return the class, and whether features have scales."""
    features = QueriesAndKeys(name)
    return type(features.feature_map), features(*inputs(2))[1][1] is None


# one of each kind: all are traced below, which takes a third of the time
KINDS = {kind(name): name for name in reversed(FEATURE_MAPS)}


@pytest.mark.parametrize("name", KINDS.values())
def test_one_graph(name: str) -> None:
    torch._dynamo.reset()
    features = QueriesAndKeys(name)
    compiled = torch.compile(features, fullgraph=True, backend="aot_eager")
    for n in (5, 64):
        q, k = inputs(n)
        # one graph for every length at once, without one for the first length alone
        torch._dynamo.mark_dynamic(q, 2), torch._dynamo.mark_dynamic(k, 2)
        assert_same(compiled(q, k), features(q, k), (q, k))


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_export_of_any_length(name: str) -> None:
    features, length = QueriesAndKeys(name), Dim("n", min=2, max=1000)
    module = export(features, inputs(9), dynamic_shapes=[{2: length}] * 2).module()
    for n in (2, 64):
        q, k = inputs(n)
        assert_same(module(q, k), features(q, k), (q, k))
