"""Forms of operators as operations of torch.library, which graphs hold as one node each: with results without numbers
for tracing, and a gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn.ops.numerics import without_autocast
from linattn.version import __version__

# torch keeps compiled graphs on the disk and knows operators by their names: those of another version are others
NAMESPACE = f"linattn_{__version__.replace('.', '_')}"

SCHEMA = {
    Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", str | None: "str?", int: "SymInt", float: "float",
    bool: "bool", torch.dtype: "ScalarType",
}  # fmt: skip


def define(form: Any, name: str, schema: list[str]) -> Callable[..., tuple[Tensor, ...]]:
    """Define `torch.ops.<NAMESPACE>.<name>` and its gradient, in whose results an empty tensor stands for none."""
    backend, count, outputs, results = form.backend, form.tensors, form.outputs, form.outputs + form.backend.saved

    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        with without_autocast(arguments[0]):
            return backend.forward(form.make(*arguments[:-1]), arguments[-1])

    def empty(*arguments: Any) -> tuple[Tensor, ...]:
        assert backend.empty is not None
        return backend.empty(form.make(*arguments[:-1]), arguments[-1])

    def gradient(*arguments: Any) -> tuple[Tensor, ...]:
        found = form.gradient(*arguments)
        return tuple(arguments[0].new_empty(0) if g is None else g for g in found)

    def empty_gradient(*arguments: Any) -> tuple[Tensor, ...]:
        call = form.make(*arguments[results:])
        found = tuple(x.new_empty(x.shape) if differentiable(x) else None for x in call[:count])
        found = found if backend.empty_gradient is None else backend.empty_gradient(call)
        return tuple(arguments[0].new_empty(0) if g is None else g for g in found)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options = inputs[count:-1]
        ctx.save_for_backward(*(output[outputs:] if isinstance(output, tuple) else ()), *inputs[:count])

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        found = of_gradient(*grads[:outputs], *kept, *ctx.options)
        found = [g if differentiable(x) else None for g, x in zip(found, kept[backend.saved :], strict=True)]
        return *found, *[None] * (len(ctx.options) + 1)

    given = [f"Tensor upstream{i}" for i in range(outputs)] + [f"Tensor saved{i}" for i in range(backend.saved)]
    traced = _library(name, [*schema, "bool save"], results, forward, empty)
    of_gradient = _library(f"{name}_gradient", [*given, *schema], count, gradient, empty_gradient)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=keep)
    return traced


def _library(
    name: str, schema: list[str], count: int, run: Callable[..., Any], empty: Callable[..., Any]
) -> Callable[..., Any]:
    """Define `torch.ops.<NAMESPACE>.<name>`: `run` computes `count` tensors, `empty` gives their shapes to a tracer."""
    full, tags = f"{NAMESPACE}::{name}", (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
    torch.library.define(full, f"({', '.join(schema)}) -> ({', '.join(['Tensor'] * count)})", tags=tags)
    # a single one torch wants by itself
    torch.library.impl(full, "default", run if count > 1 else lambda *arguments: run(*arguments)[0])
    torch.library.register_fake(full, empty if count > 1 else lambda *arguments: empty(*arguments)[0])
    operation = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operation if count > 1 else lambda *arguments: (operation(*arguments),)


def differentiable(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()
