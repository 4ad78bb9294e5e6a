import dataclasses
import inspect
import json

import jaxtyping
import pytest
import torch
from torch.testing import assert_close

from linattn.models import LanguageModel, LanguageModelConfig
from linattn.nn import MultiheadAttention

FIELDS = {field.name: field for field in dataclasses.fields(LanguageModelConfig)}
ARGUMENTS = inspect.signature(MultiheadAttention).parameters.keys()


def test_goes_to_json_and_back():
    config = LanguageModelConfig(
        vocab_size=7, depth=2, attention=("elu", "convolution:3"), rotary=None, dropout=0.5, tie_embeddings=False
    )
    back = LanguageModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert back == config and hash(back) == hash(config)


def test_a_list_of_layers_is_a_tuple_of_layers():
    fields = LanguageModelConfig(vocab_size=7, depth=2, attention=("elu", "local")).to_dict()
    assert fields["attention"] == ["elu", "local"]
    assert LanguageModelConfig.from_dict(fields).attention == ("elu", "local")


def test_names_of_layers_repeat():
    config = LanguageModelConfig(vocab_size=7, depth=6, attention=("elu", "convolution:3", "local"))
    assert config.layers == ("elu", "convolution:3", "local", "elu", "convolution:3", "local")
    assert [config.convolution_width(layer) for layer in range(6)] == [None, 3, None] * 2
    assert [type(config.mixer(layer)).__name__ for layer in (3, 4)] == ["MultiheadAttention", "GatedConvolution"]
    assert LanguageModelConfig.from_dict(config.to_dict()) == config


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LanguageModelConfig(vocab_size=7).dim = 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, but is 0"),
        ({"dim": True}, "dim must be a whole"),
        ({"depth": -1}, "depth must be a whole"),
        (
            {"num_heads": 3},
            "num_heads must divide dim, or head_dim be given, but they are 3 and 256",
        ),
        ({"num_key_heads": 3}, "num_key_heads must divide num_heads, but they are 3 and 4"),
        ({"window": 0}, "window must be a whole"),
        ({"convolution": -1}, "convolution must be a whole number of at least 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), but is 1.0"),
        ({"dropout": float("nan")}, "dropout must be a finite number"),
        ({"beta_limit": 2.5, "attention": "delta"}, "beta_limit must be above 0 and at most 2"),
        ({"beta_limit": 2.0, "attention": "ssd"}, "beta_limit is of the delta rule, but is 2.0 and no layer has one"),
        ({"convolution_on": "projections"}, "convolution is 0: there is none"),
        ({"convolution_on": "values", "convolution": 2}, "convolution_on must be one of inputs, projections"),
        ({"gate_function": "sigmoid"}, "gate is false: there is none"),
        ({"attention": "gated_delta", "causal": False}, "gated_delta is causal only"),
        ({"head_norm": True, "head_norm_eps": -1e-6}, "head_norm_eps must be a finite number of at least 0"),
        ({"head_norm_eps": 1e-5}, "head_norm_eps is of head_norm and gated_norm"),
        ({"mlp_ratio": 0.0}, "mlp_ratio must be positive"),
        ({"mlp_ratio": float("inf")}, "mlp_ratio must be a finite number"),
        ({"rotary": float("nan")}, "rotary must be a finite number"),
        ({"rotary": 1.0}, "rotary must be None or a base above 1, but is 1.0"),
        ({"mlp_ratio": 2.0, "feed_forward": "none"}, "mlp_ratio is of the feed-forward"),
        ({"norm": "batch"}, "norm must be one of rms, layer, but is 'batch'"),
        ({"feed_forward": "relu"}, "feed_forward must be one of"),
        ({"positions": "sinusoidal"}, "positions must be one of"),
        ({"positions": "learned"}, "max_length belongs to learned positions"),
        ({"max_length": 5}, "max_length belongs to learned positions"),
        ({"attention": ("elu",) * 3}, "names 3 layers, which repeat, so depth must be a multiple of 3, but is 4"),
        ({"attention": ("elu",) * 8}, "names 8 layers, which repeat, so depth must be a multiple of 8, but is 4"),
        ({"attention": ()}, r"attention must be a name, or a tuple of names of layers, but is \(\)"),
        ({"attention": ["elu"]}, r"a tuple of names of layers, but is \['elu'\]"),
        ({"attention": "nonsense"}, "nonsense"),
        ({"attention": "local+nonsense"}, "nonsense"),
        ({"attention": "linformer"}, "causal"),
        ({"attention": "local:3+elu:3"}, "heads"),
        ({"attention": "convolution:"}, "convolution"),
        ({"dim": 4 * 10**9}, "no tensor holds a matrix of these sizes"),
        ({"attention": "convolution:0"}, "convolution"),
    ],
)
def test_wrong_values_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LanguageModelConfig(**({"vocab_size": 7} | fields))


@pytest.mark.parametrize("name", sorted(ARGUMENTS & FIELDS.keys() - {"dim", "dropout"}))
def test_an_option_of_the_attention_is_written_once(name):
    """The constructor has its default and its description; those of two options suit a whole model better."""
    argument, field = inspect.signature(MultiheadAttention).parameters[name], FIELDS[name]
    assert field.type == argument.annotation and f"- `{name}`: {field.metadata['help']}\n" in MultiheadAttention.__doc__
    assert name in ("num_heads", "rotary") or field.default == argument.default


@pytest.fixture
def unchecked_types(monkeypatch):
    """As in use, where jaxtyping's hook does not look at the types of arguments first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"vocab_size": 7, "widht": 3, "dim": 8}', "unknown configuration 'widht'; known are vocab_size, dim, depth"),
        ("{}", "no vocab_size"),
        ('{"vocab_size": "7"}', "vocab_size must be a whole number"),
        ('{"vocab_size": 7, "attention": 3}', "attention must be a name"),
        ('{"vocab_size": 7, "gate": 1}', "gate must be true or false"),
        ('{"vocab_size": 7, "dropout": "0"}', "dropout must be a finite number"),
    ],
)
def test_wrong_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        LanguageModelConfig.from_dict(json.loads(text))


@pytest.mark.parametrize("dim", [16, 32, 40])
def test_the_gated_feed_forward_is_rounded_up_to_a_multiple_of_8(dim):
    gated, gelu = (
        LanguageModelConfig(vocab_size=7, dim=dim, feed_forward=kind).hidden_dim for kind in ("gated", "gelu")
    )
    assert gated % 8 == 0 and 0 <= 3 * gated - 2 * gelu < 3 * 8


def test_the_gated_feed_forward_has_as_many_weights():
    gated = LanguageModelConfig(vocab_size=7, dim=96)
    assert 3 * gated.hidden_dim == 2 * LanguageModelConfig(vocab_size=7, dim=96, feed_forward="gelu").hidden_dim


def test_the_feed_forward_of_rwkv_is_squared():
    """The preset of RWKV-7 has one without biases: y = W₂ relu(W₁ x)²."""
    model = LanguageModel(LanguageModelConfig(vocab_size=7, dim=16, num_heads=2, feed_forward="squared_relu")).double()
    feed_forward, x = model.blocks[0].feed_forward, torch.randn(2, 5, 16).double()
    hidden = torch.clamp(x @ feed_forward.up_proj.weight.T, min=0)
    assert_close(feed_forward(x), hidden * hidden @ feed_forward.down_proj.weight.T)
    assert feed_forward.up_proj.bias is None and feed_forward.down_proj.bias is None
