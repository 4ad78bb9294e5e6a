"""Compiled in one graph, feature maps give the same features and gradients."""

import pytest
import torch
from torch.testing import assert_close

from linattn.feature_maps import FEATURE_MAPS


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_one_graph(name):
    feature_map = FEATURE_MAPS[name](8, 4, 2).double()

    def features(q, k):
        return feature_map.query(q).evaluated()[:2], feature_map.key(k).evaluated()[:2]

    def gradients(function, q, k):
        total = sum(x.square().sum() for pair in function(q, k) for x in pair if x is not None)
        return torch.autograd.grad(total, (q, k))

    torch._dynamo.reset()
    compiled = torch.compile(features, fullgraph=True, backend="aot_eager")
    for n in (5, 64):
        q, k = (torch.randn(2, h, n, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2))
        # one graph for every length at once, without one for the first length alone
        torch._dynamo.mark_dynamic(q, 2), torch._dynamo.mark_dynamic(k, 2)
        for pair, expected in zip(compiled(q, k), features(q, k), strict=True):
            assert_close(pair, expected)
        assert_close(gradients(compiled, q, k), gradients(features, q, k))
