"""Operators that torch.compile keeps whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad


def define(name: str, schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """An operator `torch.ops.linattn.<name>`, with `shapes` for tracing. Returns it."""
    full = f"linattn::{name}"
    torch.library.define(full, schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    torch.library.impl(full, "default", run)
    torch.library.register_fake(full, shapes)
    return getattr(torch.ops.linattn, name).default


def kept_whole() -> bool:
    """Whether a graph is being made that may hold such operators: a compiler would unroll every loop over blocks, and
    put each temporary in memory of its own. An exported graph holds torch's own operators, as whoever loads it may have
    no others; and under a function transform these have no tangents, nor gradients."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0
