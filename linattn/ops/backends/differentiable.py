"""Makes an operator of a forward and a hand-written backward, so that gradients, gradients of gradients, vmap and
torch.compile all work, and forward-mode differentiation is refused rather than silently wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from linattn.ops.backends.base import without_autocast

Tensors = tuple[Tensor | None, ...]


def differentiable(
    forward: Callable[[Tensors, Any], tuple[Tensor, ...]],
    backward: Callable[[Tensors, tuple[Tensor, ...], Tensors, Any], Tensors],
    definition: Callable[[Tensors, Any], tuple[Tensor, ...]],
    outputs: int,
) -> Callable[..., tuple[Tensor, ...]]:
    """An operator `(options, *inputs) -> (*outputs, *saved)`.

    forward(inputs, options) may return, after its outputs, tensors to keep for backward(inputs, results, gradients,
    options), which gives a gradient or None for each input. The definition serves second derivatives: they are rare."""

    class Operator(Function):
        @staticmethod
        def forward(options: Any, *inputs: Tensor | None) -> tuple[Tensor, ...]:
            return forward(inputs, options)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.options, ctx.inputs = inputs[0], len(inputs) - 1
            ctx.mark_non_differentiable(*output[outputs:])
            ctx.save_for_backward(*inputs[1:], *output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            tensors, grads = ctx.saved_tensors, grads[:outputs]
            # torch.compile cannot trace an operator inside a backward, and asks for no second derivative
            with without_autocast(grads[0]):
                if torch.compiler.is_compiling():
                    return None, *backward(tensors[: ctx.inputs], tensors[ctx.inputs :], grads, ctx.options)
                return None, *Gradient.apply((ctx.options, ctx.inputs), *tensors, *grads)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
            return _vmap(Operator, info.batch_size, in_dims, args)

    class Gradient(Function):
        @staticmethod
        def forward(options: tuple[Any, int], *tensors: Tensor | None) -> Tensors:
            inputs, results, grads = tensors[: options[1]], tensors[options[1] : -outputs], tensors[-outputs:]
            return backward(inputs, results, grads, options[0])  # type: ignore[arg-type]

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
            (ctx.options, ctx.inputs), *tensors = inputs
            ctx.results = len(tensors) - ctx.inputs - outputs
            ctx.save_for_backward(*tensors[: ctx.inputs], *tensors[-outputs:])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
            second = _second_derivative(definition, ctx.saved_tensors, outputs, grads, ctx.options)
            return None, *second[: ctx.inputs], *[None] * ctx.results, *second[ctx.inputs :]

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
            return _vmap(Gradient, info.batch_size, in_dims, args)

    def operator(options: Any, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        # without gradients torch.compile inlines forward, and gives one of variadic inputs a context it does not take
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        if torch.compiler.is_compiling() and not wanted:
            return forward(inputs, options)
        return Operator.apply(options, *(_apart(inputs) if torch.compiler.is_compiling() else inputs))

    return operator


def _apart(inputs: Tensors) -> Tensors:
    """Views of the tensors that are given a second time, which the compiler does not take."""
    return tuple(
        x if x is None or not any(x is other for other in inputs[:i]) else x.view_as(x) for i, x in enumerate(inputs)
    )


def _second_derivative(
    definition: Callable[[Tensors, Any], tuple[Tensor, ...]],
    tensors: Tensors,
    outputs: int,
    grads: Tensors,
    options: Any,
) -> list[Tensor | None]:
    """Of the definition's gradient, with respect to the inputs and to the outputs' gradients."""
    wanted = [x is not None and x.is_floating_point() for x in tensors]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(w) if x is not None else None for x, w in zip(tensors, wanted, strict=True)]
        inputs, upstream = tuple(leaves[:-outputs]), leaves[-outputs:]
        xs = [x for x in inputs if x is not None and x.requires_grad]
        results = definition(inputs, options)
        first = torch.autograd.grad(results, xs, upstream, create_graph=True, materialize_grads=True)  # type: ignore
        targets = [x for x in leaves if x is not None and x.requires_grad]
        given = [g for g, x in zip(grads, inputs, strict=True) if x is not None and x.requires_grad]
        second = iter(torch.autograd.grad(first, targets, given, materialize_grads=True))  # type: ignore
    return [next(second) if w else None for w in wanted]


def _vmap(function: Any, size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """One more leading dimension, which is all that vmap asks of an operator that takes any number of them."""

    def front(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    # the options stand first and are no tensors
    results = function.apply(args[0], *map(front, args[1:], in_dims[1:]))
    return results, tuple(None if x is None else 0 for x in results)
