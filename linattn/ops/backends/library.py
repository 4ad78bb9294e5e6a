"""Operators that torch.compile keeps whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linattn.ops.backends.base import without_autocast


def define(name: str, schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """An operator `torch.ops.linattn.<name>`, with `shapes` for tracing. Returns it."""
    full = f"linattn::{name}"

    def run_exactly(*arguments: Any) -> Any:
        # an exported graph may be called where autocast is on
        with without_autocast(arguments[0]):
            return run(*arguments)

    torch.library.define(full, schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    torch.library.impl(full, "default", run_exactly)
    torch.library.register_fake(full, shapes)
    return getattr(torch.ops.linattn, name).default


def differentiate(name: str, backward: Callable[..., Any], num_inputs: int, num_outputs: int) -> None:
    """Gradients of its first arguments, by what `differentiable` takes; the other arguments are options. Of an exported
    operator too, of which nothing but its name is left."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        saved = output[num_outputs:] if isinstance(output, tuple) else ()
        ctx.options = inputs[num_inputs:]
        ctx.save_for_backward(*inputs[:num_inputs], *saved)

    def gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        found = backward(tensors[:num_inputs], tensors[num_inputs:], grads[:num_outputs], ctx.options)
        return *found, *[None] * len(ctx.options)

    torch.library.register_autograd(f"linattn::{name}", gradient, setup_context=keep)


def transformed() -> bool:
    """Whether a graph is being made through a function transform, or in forward mode, of which such operators know
    nothing: their tangents would be zero without a word."""
    if not torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def kept_whole(x: Tensor | None) -> bool:
    """Whether a graph is being made that may hold such operators, for the tokens of x (..., n, d).

    A compiler would unroll every loop over blocks, and put each temporary in memory of its own. An exported graph holds
    torch's own operators, as whoever loads it may have no others, unless it is for any length."""
    if x is None or not torch.compiler.is_compiling() or transformed():
        return False
    return not torch.compiler.is_exporting() or isinstance(x.shape[-2], torch.SymInt)
