"""A model while it trains: the weights that train have gradients and are float32, and there is no dropout or other
noise."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

# the noise of routers, of masked spectra and of positions of patches, and the values without it
_NOISE = {
    **dict.fromkeys(("input_jitter_noise", "jitter_noise", "moe_jitter_eps"), 0.0),
    **dict.fromkeys(("mask_feature_prob", "mask_time_prob"), 0.0),
    **dict.fromkeys(("pos_embed_jitter", "pos_embed_rescale", "pos_embed_shift"), None),
}


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
    """Set every rate of dropout to zero inside the block, of layers and of modules that call torch's function, and turn
    off the other noise that models of transformers have in training. Models read some of these from their
    configuration."""
    configs = [
        config for module in model.modules() if isinstance(config := vars(module).get("config"), PreTrainedConfig)
    ]
    rates = [
        (owner, name, rate)
        for owner in (*model.modules(), *configs)
        for name, rate in vars(owner).items()
        if isinstance(rate, float)
        and ("drop" in name or name in _NOISE or (name == "p" and isinstance(owner, nn.modules.dropout._DropoutNd)))
    ]
    try:
        for owner, name, _ in rates:
            setattr(owner, name, _NOISE.get(name, 0.0))
        yield
    finally:
        for owner, name, rate in rates:
            setattr(owner, name, rate)
