"""The operator as one graph, forward and backward. Code is not generated: that needs a compiler, and minutes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import LinearState, ask, causal_linear_attention, linear_attention, summarize
from tests.laws import masks, tokens


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return causal_linear_attention(q, k, v, key_mask=mask, feature_map="elu_plus_one")[0]


def decaying(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    y, state = causal_linear_attention(
        q, k, v, log_decay=-k[..., 0].exp(), key_mask=mask, normalize="keys", feature_map="elu_plus_one"
    )
    return y + state.S.mean()


def over_all(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return linear_attention(q, k, v, key_mask=mask, feature_map="elu_plus_one")


def in_two_halves(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ask(q, summarize(k, v, key_mask=mask, feature_map="softplus"), feature_map="softplus")


@pytest.mark.parametrize("operator", [causal, decaying, over_all, in_two_halves])
def test_one_graph_gives_the_same_outputs_and_gradients(operator: Callable[..., Tensor]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    # 128 is the length at which nothing is padded
    for n in (100, 128):
        inputs, mask = [x.requires_grad_() for x in tokens(n)], masks(n)["holes"]
        y, expected = compiled(*inputs, mask), operator(*inputs, mask)
        assert_close(y, expected)
        upstream = torch.randn_like(y)
        assert_close(torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, inputs, upstream))


def test_one_graph_decodes() -> None:
    torch.compiler.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=count)
    def step(q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        return causal_linear_attention(q, k, v, state, feature_map="elu_plus_one")

    q, k, v = tokens(20)
    y, state = causal_linear_attention(*(x[..., :10, :] for x in (q, k, v)), feature_map="elu_plus_one")
    ys = [y]
    for i in range(10, 20):
        y, state = step(*(x[..., i : i + 1, :] for x in (q, k, v)), state)
        ys.append(y)
    assert_close(torch.cat(ys, -2), causal_linear_attention(q, k, v, feature_map="elu_plus_one")[0])
    assert len(graphs) == 1
