"""Each layer of examples/layers is `MultiheadAttention` with the options of its preset and the same weights, in outputs
and in all gradients."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from examples.layers.gated_deltanet import GatedDeltaNet
from examples.layers.gla import GatedLinearAttention
from examples.layers.mamba2 import Mamba2
from examples.layers.performer import PerformerAttention
from linattn import MultiheadAttention, named_attention
from linattn.feature_maps.random_projection import default_num_features
from linattn.models import PRESETS
from tests.models.presets import attention_options

DIM, HEADS = 24, 3
FOLDER = Path(inspect.getfile(GatedDeltaNet)).parent

# their names on the left, those of MultiheadAttention on the right
CONVOLUTIONS = {f"{name}_conv": f"convolution.parts.{place}" for place, name in enumerate("qkv")}
HEAD_DECAY = {"step_proj": "gates.decay.proj", "step_bias": "gates.decay.dt_bias", "log_rate": "gates.decay.A_log"}


class Example(NamedTuple):
    """A layer, named as its preset: constructor, sizes, those of MultiheadAttention, and names of tensors."""

    make: Callable[..., nn.Module]
    sizes: dict[str, int]
    our_sizes: dict[str, int]
    names: dict[str, str]


EXAMPLES = {
    "gated_deltanet": Example(
        GatedDeltaNet,
        {"key_dim": 6, "head_dim": 10},
        {"key_dim": 6, "head_dim": 10},
        {**CONVOLUTIONS, **HEAD_DECAY, "beta_proj": "gates.strength.proj", "norm": "head_norm"},
    ),
    "mamba2": Example(
        Mamba2,
        {"state_dim": 12, "head_dim": 10},
        {"key_dim": 12, "head_dim": 10},
        {**CONVOLUTIONS, **HEAD_DECAY, "skip": "value_skip", "norm": "gated_norm"},
    ),
    "gla": Example(
        GatedLinearAttention,
        {"key_dim": 6, "head_dim": 10},
        {"key_dim": 6, "head_dim": 10},
        {"decay_in": "gates.decay.in_proj", "decay_out": "gates.decay.out_proj", "norm": "head_norm"},
    ),
    "performer": Example(
        PerformerAttention,
        {"num_features": default_num_features(DIM // HEADS)},
        {"key_dim": DIM // HEADS},
        {"projection": "inner.feature_map.projection"},
    ),
}
every_example = pytest.mark.parametrize("name", EXAMPLES)


def renamed(name: str, names: dict[str, str]) -> str:
    """Return the name in MultiheadAttention of a tensor of an example."""
    for theirs, ours in names.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return name


@every_example
def test_the_layer_is_multihead_attention(name):
    make, sizes, our_sizes, names = EXAMPLES[name]
    example, method = make(DIM, HEADS, **sizes).double(), PRESETS[name].attention[0]
    inner = named_attention(method, num_heads=HEADS, head_dim=our_sizes["key_dim"], causal=True)
    layer = MultiheadAttention(DIM, HEADS, inner, **(attention_options(name) | our_sizes)).double()
    layer.load_state_dict({renamed(key, names): tensor for key, tensor in example.state_dict().items()})
    x, dy = torch.randn(2, 2, 70, DIM, dtype=torch.float64)
    y = example(x)
    assert_close(y, layer(x))
    weights, own_names = dict(layer.named_parameters()), [key for key, _ in example.named_parameters()]
    found = torch.autograd.grad(y, [*example.parameters()], dy)
    expected = torch.autograd.grad(layer(x), [weights[renamed(key, names)] for key in own_names], dy)
    for key, gradient, wanted in zip(own_names, found, expected, strict=True):
        assert gradient.any(), key
        assert_close(gradient, wanted)


def test_every_file_is_tested_and_fits_on_a_screen():
    files = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.py")}
    assert files.keys() == EXAMPLES.keys()
    assert all(len(text.splitlines()) <= 60 and "https://arxiv.org/abs/" in text for text in files.values())
