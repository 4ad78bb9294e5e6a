"""What follows from an operator's record, seen on a toy of one file: y = a w x Σ x, where w may be absent."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linattn.ops.operator import Backend, Operator, Tensors


class ToyCall(NamedTuple):
    x: Tensor
    weight: Tensor | None
    a: int


def define(call: ToyCall, save: bool) -> tuple[Tensor]:
    x = call.x if call.weight is None else call.x * call.weight
    return (call.a * x * call.x.sum(-1, keepdim=True),)


def forward(call: ToyCall, save: bool) -> tuple[Tensor, Tensor]:
    total = call.x.sum(-1, keepdim=True)
    y = call.a * call.x * total
    return (y if call.weight is None else y * call.weight), total if save else total.new_empty(0)


def gradient(call: ToyCall, saved: Tensors, grads: Tensors) -> Tensors:
    (x, weight, a), (total,), (dy,) = call, saved, grads
    assert dy is not None
    if total is None or total.numel() == 0:
        total = x.sum(-1, keepdim=True)
    weighted = x if weight is None else x * weight
    dx = a * (dy * total * (1 if weight is None else weight) + (dy * weighted).sum(-1, keepdim=True))
    return dx, None if weight is None else (a * dy * x * total).sum_to_size(weight.shape)


def empty(call: ToyCall, save: bool) -> tuple[Tensor, Tensor]:
    return call.x.new_empty(call.x.shape), call.x.new_empty((*call.x.shape[:-1], 1) if save else (0,))


def refuse_long(call: ToyCall) -> str | None:
    return None if call.x.shape[-1] < 5 else f"takes fewer than 5 numbers, but is given {call.x.shape[-1]}"


TOY = Operator(
    "toy",
    ToyCall,
    outputs=1,
    backends=(
        Backend("quick", refuse_long, forward, gradient, empty, saved=1),
        Backend("definition", None, define),
    ),
)
every_weight = pytest.mark.parametrize("weighted", [True, False])


def inputs(weighted: bool, n: int = 4) -> tuple[Tensor, ...]:
    tensors = [torch.randn(2, 3, n, dtype=torch.float64), torch.randn(2, 3, n, dtype=torch.float64)]
    return tuple(x.requires_grad_() for x in tensors[: 1 + weighted])


def toy(x: Tensor, weight: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    call = ToyCall(x, weight, 3)
    return TOY.choose(call, backend)(call)[0]


def toy_definition(*x: Tensor) -> Tensor:
    return toy(*x, backend="definition")


@every_weight
def test_derivatives_of_any_order(weighted: bool) -> None:
    tensors = inputs(weighted)
    assert torch.autograd.gradcheck(toy, tensors)
    assert torch.autograd.gradgradcheck(toy, tensors, fast_mode=True)

    def gradients(*x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(toy(*x).sin().sum(), x, create_graph=True)

    assert torch.autograd.gradgradcheck(gradients, tensors, fast_mode=True)


@every_weight
def test_vmap_and_its_gradients(weighted: bool) -> None:
    tensors = tuple(x.detach() for x in inputs(weighted))
    assert_close(torch.func.vmap(toy)(*tensors), toy_definition(*tensors))
    every = tuple(range(len(tensors)))
    ours, theirs = (torch.func.jacrev(f, argnums=every)(*tensors) for f in (toy, toy_definition))
    assert_close(ours, theirs)


def test_a_backend_is_chosen_named_or_explained() -> None:
    short, long = ToyCall(*inputs(True), 3), ToyCall(*inputs(True, 5), 3)
    assert TOY.explain(short) == "quick: runs this call\ndefinition: can run it, when named"
    assert TOY.explain(long) == "quick: takes fewer than 5 numbers, but is given 5\ndefinition: runs this call"
    assert_close(TOY.choose(long)(long)[0], TOY.choose(long, "definition")(long)[0])
    with pytest.raises(NotImplementedError, match="quick: takes fewer than 5 numbers"):
        TOY.choose(long, "quick")
    with pytest.raises(ValueError, match="did you mean 'quick'"):
        TOY.choose(short, "quik")


def test_nothing_is_saved_that_no_gradient_needs() -> None:
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        toy(*inputs(True))
    assert [tuple(x.shape) for x in saved] == [(2, 3, 1), (2, 3, 4), (2, 3, 4)]
