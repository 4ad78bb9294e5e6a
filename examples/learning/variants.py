"""One thing changed in a model: an option of its configuration, or its values before training. What is it worth?"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from linattn import LanguageModel, LanguageModelConfig
from linattn.nn.gates import SigmoidDecay


@dataclass(frozen=True, kw_only=True)
class Variant:
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration."""
    begin: Callable[[LanguageModel], None] | None = None
    """Changes a model before its training."""

    def model(self, config: LanguageModelConfig) -> LanguageModel:
        """Return a new model, ValueError if it computes what a model without the change does, to rounding."""
        drawn = torch.get_rng_state()
        plain = LanguageModel(config)
        torch.set_rng_state(drawn)
        model = LanguageModel(replace(config, **self.options))
        tokens = torch.arange(16)[None]
        with torch.no_grad():
            if self.begin is not None:
                self.begin(model)
            if torch.allclose(model(tokens), plain(tokens), rtol=0.0, atol=1e-5):
                raise ValueError(f"this variant changes nothing in a model with {config.attention}")
        return model


def spread_decays(model: LanguageModel, *, first: float, last: float) -> None:
    """The channels of a key forget within `first` to `last` tokens in gated linear attention, the logarithms evenly
    spaced: α = e^(−1/tokens) = σ(b)^(1/16)."""
    for module in model.modules():
        if isinstance(module, SigmoidDecay):
            tokens = torch.logspace(math.log10(first), math.log10(last), module.key_dim, dtype=torch.float64)
            bias = torch.exp(-16 / tokens).logit()
            module.out_proj.bias.copy_(bias.repeat(len(module.out_proj.bias) // module.key_dim))


def zero_outputs(model: LanguageModel) -> None:
    """Every layer begins as x ↦ x: what it adds comes from matrices of zeros."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in {"o_proj", "down_proj"}:
            for parameter in module.parameters():
                parameter.zero_()


def scale_matrices(model: LanguageModel, *, factor: float) -> None:
    for module in model.get_stack().modules():
        if isinstance(module, nn.Linear):
            module.weight.mul_(factor)


VARIANTS = {
    **{
        f"head_norm_eps={eps}": Variant(options={"head_norm_eps": float(eps)})
        for eps in ("1e-8", "1e-6", "1e-3", "1e-2")
    },
    "unit_keys": Variant(options={"unit_keys": True}),
    "zero_outputs": Variant(begin=zero_outputs),
    "matrices*3": Variant(begin=partial(scale_matrices, factor=3.0)),
    "decays_1000_100": Variant(begin=partial(spread_decays, first=1_000.0, last=100.0)),
    "decays_1000_10": Variant(begin=partial(spread_decays, first=1_000.0, last=10.0)),
}
