"""Makes an operator of a forward and a hand-written backward, so that gradients, gradients of gradients, vmap and
torch.compile all work, and forward-mode differentiation is refused rather than silently wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from linattn.ops.backends.base import without_autocast

Tensors = tuple[Tensor | None, ...]


def differentiable(
    forward: Callable[[Tensors, Any], tuple[Tensor, ...]],
    backward: Callable[[Tensors, Tensors, Tensors, Any], Tensors],
    definition: Callable[[Tensors, Any], tuple[Tensor, ...]],
    outputs: int,
) -> Callable[..., tuple[Tensor, ...]]:
    """An operator `(options, *inputs) -> (*outputs, *saved)`.

    forward(inputs, options) may return, after its outputs, tensors to save for backward(inputs, saved, gradients,
    options), which gives a gradient or None for each input. Inside vmap each saved tensor is None, as its layout knows
    nothing of the new dimension: backward then computes it again. The definition serves second derivatives, which are
    rare, and all derivatives beyond."""

    class Operator(Function):
        @staticmethod
        def forward(options: Any, *inputs: Tensor | None) -> tuple[Tensor, ...]:
            return forward(inputs, options)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.options, ctx.inputs = inputs[0], len(inputs) - 1
            ctx.mark_non_differentiable(*output[outputs:])
            ctx.save_for_backward(*inputs[1:], *output[outputs:])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            tensors, grads = ctx.saved_tensors, grads[:outputs]
            # torch.compile cannot trace an operator inside a backward, and asks for no second derivative
            with without_autocast(grads[0]):
                if torch.compiler.is_compiling():
                    return None, *backward(tensors[: ctx.inputs], tensors[ctx.inputs :], grads, ctx.options)
                _refuse_old_vmap(grads)
                return None, *Gradient.apply((ctx.options, ctx.inputs), *tensors, *grads)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
            return _vmap(Operator, info.batch_size, in_dims, args)

    class Gradient(Function):
        @staticmethod
        def forward(options: tuple[Any, int], *tensors: Tensor | None) -> Tensors:
            inputs, saved, grads = tensors[: options[1]], tensors[options[1] : -outputs], tensors[-outputs:]
            return backward(inputs, saved, grads, options[0])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
            (ctx.options, ctx.inputs), *tensors = inputs
            ctx.saved = len(tensors) - ctx.inputs - outputs
            ctx.save_for_backward(*tensors[: ctx.inputs], *tensors[-outputs:])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
            with without_autocast(ctx.saved_tensors[0]):
                second = _second_derivative(definition, ctx.saved_tensors, outputs, grads, ctx.options)
            return None, *second[: ctx.inputs], *[None] * ctx.saved, *second[ctx.inputs :]

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
            (_, inputs), saved = args[0], len(args) - 1 - args[0][1] - outputs
            args = *args[: 1 + inputs], *[None] * saved, *args[len(args) - outputs :]
            return _vmap(Gradient, info.batch_size, in_dims, args)

    def operator(options: Any, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        # without gradients torch.compile inlines forward, and gives one of variadic inputs a context it does not take
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        if torch.compiler.is_compiling() and not wanted:
            return forward(inputs, options)
        _refuse_forward_mode(inputs)
        return Operator.apply(options, *inputs)

    return operator


def _refuse_old_vmap(grads: tuple[Tensor, ...]) -> None:
    if any(torch._C._functorch.is_legacy_batchedtensor(g) for g in grads):
        raise NotImplementedError(
            "is_grads_batched and jacobian(vectorize=True) use a vmap that knows no custom operators: take "
            'torch.func.jacrev, torch.func.vmap of a function of torch.func.vjp, or backend="reference"'
        )


def _refuse_forward_mode(inputs: Tensors) -> None:
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise NotImplementedError(
            "linear attention has no forward-mode derivative: take a reverse-mode one (torch.func.grad, vjp or jacrev) "
            'or backend="reference"'
        )


def _second_derivative(
    definition: Callable[[Tensors, Any], tuple[Tensor, ...]],
    tensors: Tensors,
    outputs: int,
    grads: Tensors,
    options: Any,
) -> list[Tensor | None]:
    """Derivatives of the definition's gradient, with respect to the inputs and to the outputs' gradients. As it is made
    of torch's own operations, further derivatives follow."""
    wanted = [x is not None and x.is_floating_point() for x in tensors]
    inputs, among_inputs = tensors[:-outputs], wanted[:-outputs]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        found = iter(given)
        return definition(tuple(next(found) if w else x for x, w in zip(inputs, among_inputs, strict=True)), options)

    def gradient(*given: Tensor) -> tuple[Tensor, ...]:
        _, pull_back = torch.func.vjp(run, *given[:-outputs])
        return pull_back(given[-outputs:])

    _, pull_back = torch.func.vjp(gradient, *(x for x, w in zip(tensors, wanted, strict=True) if w))
    second = iter(pull_back(tuple(g for g, w in zip(grads, among_inputs, strict=True) if w)))
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
