"""One thing changed in a model: an option of its configuration, or its values before training. What is it worth?"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linattn import LanguageModel, LanguageModelConfig
from linattn.nn.gates import BoundedDecay, ChannelDecay, HeadDecay, SigmoidDecay


@dataclass(frozen=True, kw_only=True)
class Variant:
    options: Mapping[str, Any] = field(default_factory=dict)
    """The changed options of the configuration."""
    begin: Callable[[LanguageModel], None] | None = None
    """Changes a model before its training."""

    def model(self, config: LanguageModelConfig) -> LanguageModel:
        """Return a new model, ValueError if it computes what a model without the change does, to rounding."""
        drawn = torch.get_rng_state()
        plain = LanguageModel(config)
        torch.set_rng_state(drawn)
        model = LanguageModel(replace(config, **self.options))
        tokens = torch.arange(16)[None] % config.vocab_size
        with torch.no_grad():
            if self.begin is not None:
                self.begin(model)
            if torch.allclose(model(tokens), plain(tokens), rtol=0.0, atol=1e-5):
                raise ValueError(f"this variant changes nothing in a model with {config.attention}")
        return model


def spread_decays(model: LanguageModel, *, first: float, last: float) -> None:
    """Begin with α = e^(−1/tokens) from `first` to `last` tokens, the logarithms evenly spaced: a head's channels, or
    the heads where a head has one decay."""
    for module in model.modules():
        if isinstance(module, HeadDecay | ChannelDecay):
            count = module.key_dim if isinstance(module, ChannelDecay) else len(module.dt_bias)
            module.A_log.zero_()
            module.dt_bias.copy_(_rates(module.dt_bias, count, first, last).expm1().log())
        elif isinstance(module, BoundedDecay):
            module.bias.copy_((_rates(module.bias, module.key_dim, first, last) * math.exp(0.5)).logit())
        elif isinstance(module, SigmoidDecay):
            bias = module.out_proj.bias
            bias.copy_(torch.exp(-16 * _rates(bias, module.key_dim, first, last)).logit())


def _rates(bias: Tensor, count: int, first: float, last: float) -> Tensor:
    tokens = torch.logspace(math.log10(first), math.log10(last), count, dtype=torch.float64)
    return 1 / tokens.repeat(len(bias) // count)


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


# models with a SiLU alone have a convolution one token wide
INDUCTION = {"convolution": 4, "induction": True}
VARIANTS = {
    **{
        f"head_norm_eps={eps}": Variant(options={"head_norm_eps": float(eps)})
        for eps in ("1e-8", "1e-6", "1e-3", "1e-2")
    },
    "unit_keys": Variant(options={"unit_keys": True}),
    "induction": Variant(options=INDUCTION),
    # instead of SwiGLU, with as many weights
    "induction+squared_relu": Variant(options={**INDUCTION, "feed_forward": "squared_relu"}),
    "zero_outputs": Variant(begin=zero_outputs),
    "matrices*3": Variant(begin=partial(scale_matrices, factor=3.0)),
    **{
        f"decays_1000_{last}": Variant(begin=partial(spread_decays, first=1_000.0, last=float(last)))
        for last in (1_000, 100, 10)
    },
}
