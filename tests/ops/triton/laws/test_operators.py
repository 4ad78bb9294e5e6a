"""The kernels as operators of torch: tracing, transforms, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops import LinearState, causal_linear_attention, explain_backend, linear_attention
from linattn.ops.library import NAMESPACE

OPTIONS = {"feature_map": "elu_plus_one", "backend": "triton"}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_linear_attention(q, k, v, **OPTIONS)[0]


def decaying(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y, state = causal_linear_attention(q, k, v, log_decay=-k[..., 0].exp(), normalize=None, **OPTIONS)
    return y + state.S.mean()


def over_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, **OPTIONS)


every_operator = pytest.mark.parametrize("operator", [causal, decaying, over_all])


def tokens(n: int, device: torch.device) -> list[Tensor]:
    return [torch.randn(2, n, d, device=device) for d in (4, 4, 3)]


def close(ours: object, theirs: object) -> None:
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 5])
def test_opcheck(device: torch.device, n: int) -> None:
    operators = getattr(torch.ops, NAMESPACE)
    # in a graph the operator is the same node at every length
    checks = CHECKS[::2] if n == 1 else CHECKS
    q, k, v = (x.requires_grad_() for x in tokens(n, device))
    S, z = torch.zeros(2, 4, 3, device=device), torch.zeros(2, 4, device=device)
    log_decay, mask = -torch.rand(2, n, device=device), torch.rand(2, n, device=device) < 0.7
    call = (q, k, v, S, z, log_decay, mask, "output", "elu_plus_one", False)
    torch.library.opcheck(operators.causal_triton.default, (*call, True), test_utils=checks)
    torch.library.opcheck(operators.sum_keys_triton.default, (k, v, mask, "softplus", True), test_utils=checks)
    for normalized in (True, False):
        call = (q, S, z + 1, normalized, "softplus", torch.float32, True)
        torch.library.opcheck(operators.read_triton.default, call, test_utils=checks)


def test_opcheck_of_gradients(device: torch.device) -> None:
    operators = getattr(torch.ops, NAMESPACE)
    q, k, v = tokens(5, device)
    S, z = torch.zeros(2, 4, 3, device=device), torch.ones(2, 4, device=device)
    call = (q, k, v, S, z, None, None, "output", "elu_plus_one", False)
    grads = [torch.randn_like(x) for x in operators.causal_triton(*call, True)]
    for operator, arguments in (
        (operators.causal_triton_gradient, (*grads, *call)),
        (operators.sum_keys_triton_gradient, (S, z, k, v, None, "relu")),
        (operators.read_triton_gradient, (grads[0], q, S, z, True, "relu", torch.float32)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


@every_operator
def test_forward_mode_is_refused_not_wrong(operator: Callable[..., Tensor], device: torch.device) -> None:
    for n in (1, 5):
        inputs = tuple(tokens(n, device))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(operator, inputs, inputs)


@pytest.mark.parametrize("operator", [causal, over_all])
def test_vmap_is_a_loop_and_so_are_its_gradients(operator: Callable[..., Tensor], device: torch.device) -> None:
    q, k, v = (torch.stack([x, 2 * x]) for x in tokens(6, device))
    looped = torch.stack([operator(q[i], k[0], v[i]) for i in range(2)])
    close(torch.func.vmap(operator, in_dims=(0, None, 0))(q, k[0], v), looped)
    gradient = torch.func.grad(lambda *x: operator(*x).square().sum(), argnums=(0, 1, 2))
    together = torch.func.vmap(gradient, in_dims=(0, None, 0))(q, k[0], v)
    apart = zip(*(gradient(q[i], k[0], v[i]) for i in range(2)), strict=True)
    close(together, tuple(torch.stack(g) for g in apart))


@every_operator
def test_second_derivatives(operator: Callable[..., Tensor], device: torch.device) -> None:
    inputs = [x.requires_grad_() for x in tokens(6, device)]
    seconds = []
    for attend in (operator, lambda *x: operator_of_reference(operator)(*x)):
        y = attend(*inputs)
        first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    close(*seconds)


def operator_of_reference(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same with the definition."""

    def run(*x: Tensor) -> Tensor:
        OPTIONS["backend"] = "reference"
        try:
            return operator(*x)
        finally:
            OPTIONS["backend"] = "triton"

    return run


@every_operator
def test_one_graph_for_all_lengths(operator: Callable[..., Tensor], device: torch.device) -> None:
    torch.compiler.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(operator, fullgraph=True, backend=count, dynamic=True)
    for n in (5, 6, 9):
        inputs = tokens(n, device)
        close(compiled(*inputs), operator(*inputs))
    assert len(graphs) == 1


@every_operator
def test_one_graph_with_gradients(operator: Callable[..., Tensor], device: torch.device) -> None:
    torch.compiler.reset()
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    inputs = [x.requires_grad_() for x in tokens(6, device)]
    y, expected = compiled(*inputs), operator(*inputs)
    close(y, expected)
    upstream = torch.randn_like(y)
    close(torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, inputs, upstream))


def test_one_graph_decodes(device: torch.device) -> None:
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def step(q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        return causal_linear_attention(q, k, v, state, **OPTIONS)

    q, k, v = tokens(5, device)
    y, state = causal_linear_attention(*(x[..., :2, :] for x in (q, k, v)), **OPTIONS)
    ys = [y]
    for i in range(2, 5):
        y, state = step(*(x[..., i : i + 1, :] for x in (q, k, v)), state)
        ys.append(y)
    close(torch.cat(ys, -2), causal(q, k, v))


@pytest.mark.parametrize("attend", [causal_linear_attention, linear_attention])
def test_forward_mode_in_a_graph_is_not_the_kernels(attend: Callable[..., Any], device: torch.device) -> None:
    def tangent(backend: str | None, *x: Tensor) -> Tensor:
        def operator(*x: Tensor) -> Tensor:
            y = attend(*x, feature_map="elu_plus_one", backend=backend)
            return y[0] if isinstance(y, tuple) else y

        return torch.func.jvp(operator, x, x)[1]

    torch.compiler.reset()
    inputs = tokens(6, device)
    close(torch.compile(tangent, fullgraph=True, backend="aot_eager")(None, *inputs), tangent("reference", *inputs))


@every_operator
def test_exports_with_a_dynamic_length(operator: Callable[..., Tensor], device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return operator(q, k, v)

    n = torch.export.Dim("n", min=2, max=1 << 20)
    exported = torch.export.export(Module(), tuple(tokens(5, device)), dynamic_shapes=[{1: n}] * 3)
    others = tokens(8, device)
    close(exported.module()(*others), operator(*others))


@every_operator
def test_checkpointing_gives_the_same_gradients(operator: Callable[..., Tensor], device: torch.device) -> None:
    inputs = [x.requires_grad_() for x in tokens(6, device)]
    y = torch.utils.checkpoint.checkpoint(operator, *inputs, use_reentrant=False)
    close(torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(operator(*inputs).sum(), inputs))


def test_what_it_cannot_do_is_said(device: torch.device) -> None:
    q, k, v = tokens(6, device)
    for inputs, options, message in (
        ([x.double() for x in (q, k, v)], {}, "float64"),
        ((q, k, v), {"normalize": "keys"}, 'causal normalize="keys"'),
        ([torch.randn(3, 300, device=device)] * 3, {}, "1 to 256 features"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            causal_linear_attention(*inputs, **options, backend="triton")
        lines = explain_backend(*inputs, **options).splitlines()
        assert message.split()[0] in lines[0] and any(line.endswith(": runs this call") for line in lines[1:])
        causal_linear_attention(*inputs, **options)


def test_it_is_the_first_choice(device: torch.device) -> None:
    q, k, v = tokens(6, device)
    assert explain_backend(q, k, v).splitlines()[0] == "triton: runs this call"
    assert explain_backend(q, k, v, is_causal=False).splitlines()[0] == "triton: runs this call"
    assert torch.equal(causal_linear_attention(q, k, v)[0], causal_linear_attention(q, k, v, backend="triton")[0])
