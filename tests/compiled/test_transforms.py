"""Function transforms in a graph give what they give without one."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.func import grad, jacrev, vmap
from torch.nn.functional import normalize
from torch.testing import assert_close

from linattn.ops import causal_delta_attention
from tests.operators import causal, decaying, gated, over_all


def delta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_delta_attention(q, normalize(k, dim=-1), v, q[..., 0].sigmoid(), log_decay=-k.exp())[0]


def loss(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *x: operator(*x).sin().sum()


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "vmap": lambda f: lambda q, k, v: vmap(f, in_dims=(0, None, 0))(q, k[0], v),
    "vmap of gradients": lambda f: vmap(grad(loss(f), (0, 1, 2))),
    "gradient of vmap": lambda f: grad(loss(vmap(f)), (0, 1, 2)),
    # many cotangents at once
    "jacobian": lambda f: jacrev(f, (0, 1, 2)),
    "hessian": lambda f: jacrev(grad(loss(f), 1), 1),
}


def inspect(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
    """Run the graph as it is, without generating code, unless inductor 2.13 would compute it wrongly: it writes into a
    broadcast tensor as if that had memory for each of its elements."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.index_put.default:
            target = node.args[0].meta["val"]
            assert all(stride or size == 1 for stride, size in zip(target.stride(), target.shape, strict=True)), node
    return make_boxed_func(graph.forward)


OPERATORS = (causal, over_all, decaying, gated, delta)
# every operator with gradients of many rows and with many cotangents, where blocks are gathered and scattered; the
# others trace the same blocks, once where they are simplest and once with a decay per channel
CASES = [
    *itertools.product(("vmap of gradients", "jacobian"), OPERATORS),
    *itertools.product(("vmap", "gradient of vmap", "hessian"), (causal, gated)),
]


def test_every_transform_has_a_case() -> None:
    assert {transform for transform, _ in CASES} == TRANSFORMS.keys()


@pytest.mark.parametrize(("transform", "operator"), CASES)
def test_a_transform_in_a_graph_is_the_transform(transform: str, operator: Callable[..., Tensor]) -> None:
    torch.compiler.reset()
    inputs = tuple(torch.randn(2, 1, 4, d, dtype=torch.float64) for d in (3, 3, 2))
    run = TRANSFORMS[transform](operator)
    backend = aot_autograd(fw_compiler=inspect, decompositions=select_decomp_table())
    assert_close(torch.compile(run, backend=backend)(*inputs), run(*inputs))
