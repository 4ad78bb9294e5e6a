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
        with without_autocast(arguments[0]):
            return run(*arguments)

    torch.library.define(full, schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    torch.library.impl(full, "default", run_exactly)
    torch.library.register_fake(full, shapes)
    return getattr(torch.ops.linattn, name).default


def transformed() -> bool:
    """Whether a graph is being made through a function transform, or in forward mode, of which such operators know
    nothing: their tangents would be zero without a word."""
    if not torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def kept_whole(x: Tensor | None) -> bool:
    """Whether a graph is being made that may hold such operators, for the tokens of x (..., n, d).

    A compiler would unroll every loop over blocks, and put each temporary in memory of its own."""
    return x is not None and torch.compiler.is_compiling() and not transformed()


def check_exported_length(n: int, what: str) -> None:
    """Some loops are of a number of blocks that a graph must know."""
    if torch.compiler.is_exporting() and isinstance(n, torch.SymInt):
        raise NotImplementedError(f"{what} can be exported for one length only: leave it out of dynamic_shapes")
