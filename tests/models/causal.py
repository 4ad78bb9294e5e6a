"""Small language models of every kind: what the laws are stated over."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linattn.attention import ATTENTIONS, traits
from linattn.models import LanguageModel, LanguageModelConfig
from linattn.nn import MultiheadAttention

VOCABULARY = 13
NAMES = sorted(name for name in ATTENTIONS if traits(name).causal and not traits(name).fixed_length)

# what the configuration offers beside the attention, each with a window smaller than the sequences
OPTIONS: dict[str, dict[str, Any]] = {
    "mixture": {"attention": "local+elu"},
    "uneven mixture": {"attention": "local:3+taylor:1"},
    "grouped keys": {"attention": "softmax", "num_key_heads": 2},
    "grouped keys of a mixture": {"attention": "local+elu", "num_key_heads": 2},
    "convolution": {"attention": "elu", "convolution": 4, "rotary": None},
    "un-normalised": {"attention": "linear_unnormalized", "head_norm": True, "gate": True},
    "delta with convolutions of its own": {
        "attention": "gated_delta",
        "convolution": 3,
        "convolution_on": "projections",
        "beta_limit": 2.0,
        "head_norm": True,
        "gate": True,
        "rotary": None,
    },
    "induction": {
        "attention": ("gated_delta", "local"),
        "convolution": 3,
        "convolution_on": "projections",
        "induction": True,
        "head_norm": True,
        "rotary": None,
    },
    "several writes": {
        "attention": "kda+gated_delta",
        "writes": 3,
        "convolution": 2,
        "convolution_on": "projections",
        "value_skip": True,
    },
    "state space": {"attention": "ssd", "key_dim": 6, "value_skip": True, "gate": True, "gated_norm": True},
    "mixture with gates": {"attention": "local:4+kda:2+ssd:2", "num_heads": 8},
    "layers": {"attention": ("convolution:3", "local"), "feed_forward": "none"},
    "learned positions": {
        "attention": "elu",
        "positions": "learned",
        "max_length": 80,
        "rotary": None,
        "feed_forward": "gelu",
        "norm": "layer",
    },
    "narrow keys": {"attention": "taylor2", "key_dim": 2, "num_key_heads": 2},
    "untied": {"attention": "elu", "tie_embeddings": False, "head_dim": 6, "convolution": 2},
}
MODELS = {name: {"attention": name} for name in NAMES} | OPTIONS

# features of either sign: a denominator may be near zero, so rounding is not small and training not steady
SIGNED = {"identity", "favor_trigonometric"}
STEADY_MODELS = {name: options for name, options in MODELS.items() if name not in SIGNED}

every_steady_model = pytest.mark.parametrize("options", STEADY_MODELS.values(), ids=STEADY_MODELS.keys())
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())


def small_model(options: dict[str, Any] | None = None, **more: Any) -> LanguageModel:
    """In float64, and initialised wide, so that every layer matters."""
    fields = {"vocab_size": VOCABULARY, "dim": 16, "depth": 2, "num_heads": 4, "window": 7}
    model = LanguageModel(LanguageModelConfig(**(fields | (options or {}) | more))).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_proj.weight", "embedding.weight", "positions.weight")):
                parameter.mul_(15)
    return model


def some_tokens(b: int, n: int) -> Tensor:
    return torch.randint(VOCABULARY, (b, n))


def structure(state: Any) -> Any:
    """What a state is made of, without its sizes."""
    return (type(state), *map(structure, state)) if isinstance(state, tuple) else type(state)


def _kind(options: dict[str, Any]) -> Any:
    model = small_model(options)
    needs = [repr(part.inner.needs) for part in model.modules() if isinstance(part, MultiheadAttention)]
    return structure(model.extend(some_tokens(1, 2))[1]), *needs


# one model of each kind of state and gates, for what does not depend on feature maps: those that come first
KINDS = {name: MODELS[name] for name in {_kind(MODELS[name]): name for name in reversed(MODELS)}.values()}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
