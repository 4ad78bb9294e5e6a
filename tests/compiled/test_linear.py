"""The operator as one graph, forward and backward. Code is not generated: that needs a compiler, and minutes."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from linattn.ops import LinearState, causal_linear_attention, linear_attention, read, summarize
from linattn.ops.library import NAMESPACE
from tests import operators
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
    return read(q, summarize(k, v, key_mask=mask, feature_map="softplus"), feature_map="softplus")


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


@pytest.mark.parametrize("operator", [causal, decaying, over_all, in_two_halves])
def test_a_graph_serves_other_lengths_and_does_not_grow_with_them(operator: Callable[..., Tensor]) -> None:
    torch.compiler.reset()
    nodes = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        # without the arithmetic of symbolic lengths, of which torch 2.11 writes more
        nodes.append(sum(getattr(node.target, "__module__", None) != "_operator" for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(operator, fullgraph=True, dynamic=True, backend=count)
    # more numbers than one block of the operator has
    for n in (3000, 2000, 5000, 1024, 2999):
        inputs, mask = [x.repeat(1, 5, 1, 4) for x in tokens(n)], torch.rand(2, 1, n) > 0.1
        assert_close(compiled(*inputs, mask), operator(*inputs, mask))
    assert len(nodes) == 1
    assert nodes[0] < 60


def test_a_graph_of_any_length_gives_the_same_gradients() -> None:
    torch.compiler.reset()
    compiled = torch.compile(decaying, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (600, 90, 1, 401):
        inputs, mask = [x.requires_grad_() for x in tokens(n)], torch.rand(2, 1, n) > 0.1
        y, expected = compiled(*inputs, mask), decaying(*inputs, mask)
        assert_close(y, expected)
        upstream = torch.randn_like(y)
        assert_close(torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, inputs, upstream))


@pytest.mark.parametrize("operator", [operators.gated, operators.sharing])
def test_every_form_of_chunks_serves_other_lengths_with_gradients(operator: Callable[..., Tensor]) -> None:
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(operator, fullgraph=True, dynamic=True, backend=graphs)
    for n in (600, 90, 401, 3001):
        inputs = [x.requires_grad_() for x in tokens(n)]
        y, expected = compiled(*inputs), operator(*inputs)
        assert_close(y, expected)
        upstream = torch.randn_like(y)
        assert_close(torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, inputs, upstream))
    # torch makes another graph where a sequence has a single block
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("n", [1, 70, 600])
def test_whole_operators_tell_their_shapes(n: int) -> None:
    # in a graph the operator is the same node at every length
    everything = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck = partial(torch.library.opcheck, test_utils=everything if n == 70 else everything[::2])
    (q, k, v), mask = tokens(n), masks(n)["holes"].expand(2, 3, n)
    S, z, decay = q.new_zeros(2, 3, q.shape[-1], v.shape[-1]), q.new_zeros(2, 3, q.shape[-1]), -torch.rand(2, 3, n)
    library = getattr(torch.ops, NAMESPACE)
    for log_decay, key_mask, save in ((None, None, False), (decay.double(), mask, True)):
        call = (q, k, v, S, z, log_decay, key_mask, "output", "elu_plus_one", False)
        opcheck(library.causal_chunked.default, (*call, save))
        results = library.causal_chunked(*call, save)
        upstream = tuple(torch.randn_like(x) for x in results[:3])
        opcheck(library.causal_chunked_gradient.default, (*upstream, *results[3:], *call))
    for form, decays in (("gated", -torch.rand(2, 3, n, 5).double()), ("shared", decay.double())):
        q_given, k_given = (x[:, :1] if form == "shared" else x for x in (q, k))
        mask_given = mask[:, :1] if form == "shared" else mask
        call = (q_given, k_given, v, S, z, decays, mask_given, "output", "elu_plus_one", False)
        forward, backward = (getattr(library, f"{form}_chunked{end}").default for end in ("", "_gradient"))
        opcheck(forward, (*call, True))
        results = forward(*call, True)
        upstream = tuple(torch.randn_like(x) for x in results[:3])
        opcheck(backward, (*upstream, *results[3:], *call))
    call = (k, v, mask, "relu")
    opcheck(library.sum_keys_chunked.default, (*call, True))
    sums = library.sum_keys_chunked(*call, True)
    opcheck(library.sum_keys_chunked_gradient.default, (*sums, *call))
    for normalized in (True, False):
        call = (q, *sums, normalized, "relu", torch.float64)
        opcheck(library.read_chunked.default, (*call, True))
        y = library.read_chunked(*call, True)
        opcheck(library.read_chunked_gradient.default, (torch.randn_like(y), *call))


@pytest.mark.parametrize("operator", [causal, over_all])
def test_forward_mode_in_a_graph_is_that_of_the_definition(operator: Callable[..., Tensor]) -> None:
    (q, k, v), mask = tokens(40), masks(40)["holes"]
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def tangent(*inputs: Tensor) -> Tensor:
        return torch.func.jvp(lambda *x: operator(*x, mask), inputs, inputs)[1]

    step = 1e-6
    moved = operator(*(x * (1 + step) for x in (q, k, v)), mask) - operator(*(x * (1 - step) for x in (q, k, v)), mask)
    assert_close(tangent(q, k, v), moved / (2 * step), rtol=1e-6, atol=1e-8)


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


# an operator with each of the compiler's modes, and each operator with one
@pytest.mark.parametrize(
    ("operator", "dynamic", "places"),
    [
        (causal, None, (0, 1, 1)),
        (causal, True, (0, 0, 0)),
        (causal, False, (1, 0, 1)),
        (decaying, True, (0, 0, 0)),
        (over_all, True, (0, 0, 0)),
        (in_two_halves, True, (0, 0, 0)),
    ],
)
def test_one_tensor_may_be_several_arguments(
    operator: Callable[..., Tensor], dynamic: bool | None, places: tuple[int, ...]
) -> None:
    torch.compiler.reset()
    compiled = torch.compile(operator, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (70, 90):
        tensors = [x.requires_grad_() for x in tokens(n, dv=5)[: 1 + max(places)]]
        inputs, mask = [tensors[i] for i in places], masks(n)["holes"]
        y, expected = compiled(*inputs, mask), operator(*inputs, mask)
        assert_close(y, expected)
        upstream = torch.randn_like(y)
        assert_close(torch.autograd.grad(y, tensors, upstream), torch.autograd.grad(expected, tensors, upstream))
