"""The operator under torch's transforms: vmap, forward-mode differentiation, autocast, checkpointing, export,
meta and fake tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from linattn.ops import causal_delta_attention, causal_linear_attention
from tests.laws import tokens
from tests.operators import OPTIONS, causal, decaying, gated, over_all, sharing

every_operator = pytest.mark.parametrize("operator", [causal, over_all, decaying])


@every_operator
def test_vmap_is_a_loop(operator: Callable[..., Tensor]) -> None:
    q, k, v = tokens(70)
    looped = torch.stack([operator(q[i], k[0], v[i]) for i in range(2)])
    assert_close(torch.func.vmap(operator, in_dims=(0, None, 0))(q, k[0], v), looped)


@every_operator
@pytest.mark.parametrize("more", range(3))
def test_vmap_keeps_leading_dimensions_apart(operator: Callable[..., Tensor], more: int) -> None:
    """One tensor has one more leading dimension, of the size of the mapped one, which is not taken for it."""
    inputs = [x[:, :2] if i == more else x[:, 0] for i, x in enumerate(tokens(70))]
    gradient = torch.func.grad(lambda *x: operator(*x).square().sum(), argnums=(0, 1, 2))
    assert_close(torch.func.vmap(operator)(*inputs), torch.stack([operator(*x) for x in zip(*inputs, strict=True)]))
    apart = zip(*(gradient(*x) for x in zip(*inputs, strict=True)), strict=True)
    assert_close(torch.func.vmap(gradient)(*inputs), tuple(torch.stack(g) for g in apart))


@every_operator
def test_vmap_of_gradients_is_a_loop(operator: Callable[..., Tensor]) -> None:
    q, k, v = tokens(70)
    gradient = torch.func.grad(lambda *x: operator(*x).square().sum(), argnums=(0, 1, 2))
    together = torch.func.vmap(gradient, in_dims=(0, None, 0))(q, k[0], v)
    apart = zip(*(gradient(q[i], k[0], v[i]) for i in range(2)), strict=True)
    assert_close(together, tuple(torch.stack(g) for g in apart))


@every_operator
@pytest.mark.parametrize(("n", "cotangents"), [(5, 15), (300, 2), (600, 3), (1100, 5)])
def test_many_cotangents_at_once_are_a_loop(operator: Callable[..., Tensor], n: int, cotangents: int) -> None:
    """As many as the sequence has blocks too: 2, 3 and 5 here, of the shapes before and behind."""
    inputs = [torch.rand(1, 2, n, d, dtype=torch.float64, requires_grad=True) for d in (16, 16, 3)]
    y = operator(*inputs)
    upstream = torch.randn(cotangents, *y.shape, dtype=y.dtype)
    looped = [torch.autograd.grad(y, inputs, each, retain_graph=True) for each in upstream]
    expected = [torch.stack(each) for each in zip(*looped, strict=True)]
    _, pull_back = torch.func.vjp(operator, *inputs)
    assert_close(torch.func.vmap(pull_back)(upstream), tuple(expected))


@every_operator
def test_jacobians_are_those_of_the_definition(operator: Callable[..., Tensor]) -> None:
    inputs = tuple(torch.rand(2, 4, d, dtype=torch.float64) for d in (3, 3, 2))
    looped = torch.autograd.functional.jacobian(operator, inputs)
    assert_close(torch.func.jacrev(operator, argnums=(0, 1, 2))(*inputs), looped)


@every_operator
def test_what_no_rule_covers_is_refused_by_name(operator: Callable[..., Tensor]) -> None:
    inputs = [x.requires_grad_() for x in tokens(130)]
    y = operator(*inputs)
    with pytest.raises(NotImplementedError, match="jacrev"):
        torch.autograd.grad(y, inputs, torch.ones(2, *y.shape, dtype=y.dtype), is_grads_batched=True)
    with pytest.raises(NotImplementedError, match="jacrev"):
        torch.autograd.functional.jacobian(operator, tuple(inputs), vectorize=True)
    with pytest.raises(NotImplementedError, match="jacrev"):
        torch.func.jacfwd(operator)(*inputs)


@every_operator
def test_hessians_of_function_transforms(operator: Callable[..., Tensor]) -> None:
    inputs = tuple(torch.rand(4, d, dtype=torch.float64) for d in (2, 2, 1))

    def loss(*x: Tensor) -> Tensor:
        return operator(*x).sin().sum()

    expected = torch.autograd.functional.hessian(loss, inputs)
    everything = (0, 1, 2)
    assert_close(torch.func.jacrev(torch.func.jacrev(loss, everything), everything)(*inputs), expected)


@every_operator
def test_gradient_of_vmap_is_the_gradient(operator: Callable[..., Tensor]) -> None:
    inputs = [x.requires_grad_() for x in tokens(70)]
    mapped = torch.func.vmap(operator)(*inputs).square().sum()
    assert_close(torch.autograd.grad(mapped, inputs), torch.autograd.grad(operator(*inputs).square().sum(), inputs))


@every_operator
def test_forward_mode_is_refused_not_wrong(operator: Callable[..., Tensor]) -> None:
    q, k, v = tokens(130)

    def loss(q: Tensor) -> Tensor:
        return operator(q, k, v).sin().sum()

    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(operator, (q, k, v), (q, k, v))
    # forward over reverse mode, and what works instead
    for transform in (torch.func.hessian(loss), lambda q: torch.func.jvp(torch.func.grad(loss), (q,), (q,))):
        with pytest.raises(NotImplementedError, match="jacrev of jacrev"):
            transform(q)


@pytest.mark.parametrize("backend", ["parallel", "reference"])
def test_forward_mode_of_what_torch_differentiates(backend: str) -> None:
    def operator(*x: Tensor) -> Tensor:
        return causal_linear_attention(*x, backend=backend, **OPTIONS)[0]

    inputs, step = tokens(9), 1e-6
    _, tangent = torch.func.jvp(operator, inputs, inputs)
    moved = (operator(*(x * (1 + step) for x in inputs)) - operator(*(x * (1 - step) for x in inputs))) / (2 * step)
    assert_close(tangent, moved, rtol=1e-6, atol=1e-8)


@every_operator
@pytest.mark.parametrize("n", [1, 300])
def test_autocast_does_not_round_the_sums(operator: Callable[..., Tensor], n: int) -> None:
    q, k, v = (x.float().requires_grad_() for x in tokens(n))
    plain = operator(q, k, v)
    gradients = torch.autograd.grad(plain.sum(), (q, k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = operator(q, k, v)
    assert_close(y, plain)
    assert_close(torch.autograd.grad(y.sum(), (q, k, v)), gradients)


@every_operator
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(operator: Callable[..., Tensor], reentrant: bool) -> None:
    inputs = [x.requires_grad_() for x in tokens(70)]
    y = checkpoint(operator, *inputs, use_reentrant=reentrant)
    gradients = torch.autograd.grad(operator(*inputs).square().sum(), inputs)
    y.square().sum().backward()
    assert_close([x.grad for x in inputs], list(gradients))


@every_operator
@pytest.mark.parametrize("n", [1, 70, 600])
def test_exports(operator: Callable[..., Tensor], n: int) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return operator(q, k, v)

    exported = torch.export.export(Module(), tokens(n))
    others = tokens(n)
    assert_close(exported.module()(*others), operator(*others))


@every_operator
def test_meta_tensors_have_shapes(operator: Callable[..., Tensor]) -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in tokens(70))
    y = operator(q, k, v)
    assert y.shape == (2, 3, 70, 3) and y.device.type == "meta"
    assert [g.shape for g in torch.autograd.grad(y.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


def delta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_delta_attention(q, k, v, v[..., 0].sigmoid(), log_decay=-k[..., 0].exp())[0]


@pytest.mark.parametrize("operator", [causal, over_all, decaying, gated, sharing, delta])
def test_fake_tensors_have_shapes(operator: Callable[..., Tensor]) -> None:
    """They stand for tensors on a CPU, but hold no numbers."""
    with FakeTensorMode():
        q, k, v = (x.requires_grad_() for x in tokens(70))
        y = operator(q, k, v)
        assert y.shape == (2, 3, 70, 3)
        assert [g.shape for g in torch.autograd.grad(y.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]
