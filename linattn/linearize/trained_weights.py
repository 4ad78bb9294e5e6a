"""The weights of a model while it trains: those that train have gradients and are float32, and there is no dropout."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


@contextmanager
def float32_weights(weights: Sequence[nn.Parameter]) -> Iterator[AbstractContextManager[Any]]:
    """Convert weights in bfloat16 to float32 inside the block, and yield the context in which their model computes in
    bfloat16 as before."""
    half = [weight for weight in weights if weight.dtype == torch.bfloat16]
    if not half:
        yield nullcontext()
        return
    try:
        for weight in half:
            weight.data = weight.data.float()
        # a cache would keep a copy of every weight until the end of the step
        yield torch.autocast(half[0].device.type, torch.bfloat16, cache_enabled=False)
    finally:
        for weight in half:
            weight.grad = None
            weight.data = weight.data.bfloat16()


@contextmanager
def trainable(model: nn.Module, weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Give gradients to these weights alone inside the block."""
    before = {weight: weight.requires_grad for weight in model.parameters()}
    try:
        model.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for weight in model.parameters():
            weight.requires_grad_(before.get(weight, True))
            weight.grad = None


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every rate of dropout to zero inside the block, of layers and of modules that call torch's function."""
    rates = [
        (module, name, rate)
        for module in model.modules()
        for name, rate in vars(module).items()
        if isinstance(rate, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout)))
    ]
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)
