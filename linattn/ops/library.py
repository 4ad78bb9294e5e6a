"""Backends as operations of torch.library, each with a gradient and, for tracing, uninitialized results. A graph holds
an operation as one node."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn.ops.numerics import without_autocast
from linattn.version import __version__

# torch reuses compiled graphs on disk by their operators' names: with the version in the name, not those of another one
NAMESPACE = f"linattn_{__version__.replace('.', '_')}"

SCHEMA = {
    Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", str | None: "str?", int: "SymInt", float: "float",
    bool: "bool", torch.dtype: "ScalarType",
}  # fmt: skip


def define(form: Any, name: str, schema: list[str]) -> Callable[..., tuple[Tensor, ...]]:
    """Return `torch.ops.<NAMESPACE>.<name>` for the DifferentiableBackend `form`; `schema` lists the fields of its
    calls. The gradient is an operation too, which returns an empty tensor in place of None."""
    backend, count, outputs, total = form.backend, form.tensors, form.outputs, form.outputs + form.backend.saved

    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        with without_autocast(arguments[0]):
            return backend.forward(form.make(*arguments[:-1]), arguments[-1])

    def empty(*arguments: Any) -> tuple[Tensor, ...]:
        assert backend.empty is not None
        return backend.empty(form.make(*arguments[:-1]), arguments[-1])

    def gradient(*arguments: Any) -> tuple[Tensor, ...]:
        results = form.gradient(*arguments)
        return tuple(arguments[0].new_empty(0) if g is None else g for g in results)

    def empty_gradient(*arguments: Any) -> tuple[Tensor, ...]:
        call = form.make(*arguments[total:])
        shapes = tuple(x.new_empty(x.shape) if differentiable(x) else None for x in call[:count])
        shapes = shapes if backend.empty_gradient is None else backend.empty_gradient(call)
        return tuple(arguments[0].new_empty(0) if g is None else g for g in shapes)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options = inputs[count:-1]
        ctx.save_for_backward(*(output[outputs:] if isinstance(output, tuple) else ()), *inputs[:count])

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        results = gradient_operation(*grads[:outputs], *tensors, *ctx.options)
        results = [g if differentiable(x) else None for g, x in zip(results, tensors[backend.saved :], strict=True)]
        return *results, *[None] * (len(ctx.options) + 1)

    others = [f"Tensor upstream{i}" for i in range(outputs)] + [f"Tensor saved{i}" for i in range(backend.saved)]
    operation = _library(name, [*schema, "bool save"], total, forward, empty)
    gradient_operation = _library(f"{name}_gradient", [*others, *schema], count, gradient, empty_gradient)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=save)
    return operation


def _library(
    name: str, schema: list[str], count: int, run: Callable[..., Any], empty: Callable[..., Any]
) -> Callable[..., Any]:
    """Define an operation with arguments `schema`: `run` computes `count` tensors, `empty` allocates them to trace."""
    full, tags = f"{NAMESPACE}::{name}", (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
    torch.library.define(full, f"({', '.join(schema)}) -> ({', '.join(['Tensor'] * count)})", tags=tags)
    # torch expects a single result by itself, not in a tuple
    torch.library.impl(full, "default", run if count > 1 else lambda *arguments: run(*arguments)[0])
    torch.library.register_fake(full, empty if count > 1 else lambda *arguments: empty(*arguments)[0])
    operation = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operation if count > 1 else lambda *arguments: (operation(*arguments),)


def differentiable(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()
