"""Weights of fast-transformers' encoder and decoder: the outputs of their definition."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from linattn.compat import weights
from linattn.compat.fast_transformers import ATTENTIONS, TransformerDecoder, TransformerEncoder
from linattn.feature_maps import HyperbolicFavorFeatureMap
from tests.compat.weights import epfl
from tests.compat.weights.old import trained

SIZE = {"n_layers": 2, "n_heads": 3, "query_dimensions": 5, "value_dimensions": 4, "feed_forward_dimensions": 17}
ENCODERS: list[dict[str, Any]] = [
    *({"attention_type": kind} for kind in ATTENTIONS),
    {"attention_type": "linear", "activation": "gelu", "final_normalization": False},
    {"attention_type": "causal-linear", "model_dimensions": 10, "dropout": 0.0},
]
DECODERS: list[dict[str, Any]] = [
    {"self_attention_type": "causal-linear", "cross_attention_type": "linear"},
    {"self_attention_type": "causal-full", "cross_attention_type": "full", "final_normalization": False},
    {
        "self_attention_type": "causal-linear",
        "cross_attention_type": "full",
        "cross_n_heads": 2,
        "cross_query_dimensions": 3,
        "cross_value_dimensions": 6,
        "cross_model_dimensions": 7,
        "activation": "gelu",
    },
]


def random_decoder(seed: int) -> dict[str, Any]:
    """Return some of the options that change a decoder's widths, each with a random size."""
    draw = random.Random(seed)
    names = ("model_dimensions", "cross_n_heads", "cross_query_dimensions", "cross_value_dimensions")
    chosen = draw.sample(names, draw.randint(1, 4)) + ["cross_model_dimensions"] * (seed % 3 == 0)
    kinds = {
        "self_attention_type": draw.choice(list(ATTENTIONS)),
        "cross_attention_type": draw.choice(["full", "linear"]),
    }
    return kinds | {name: draw.randint(1, 7) for name in chosen}


DECODERS += map(random_decoder, range(12))


@pytest.fixture(autouse=True)
def without_epsilon(monkeypatch):
    """The 10⁻⁶ in their denominators."""
    monkeypatch.setattr(epfl, "EPSILON", 0.0)


def tokens(config: dict[str, Any], n: int = 23) -> torch.Tensor:
    return torch.randn(2, n, config.get("model_dimensions", 12), dtype=torch.float64)


@pytest.mark.parametrize("options", ENCODERS, ids=str)
def test_encoders_give_their_outputs(options):
    config = SIZE | options
    old = trained(epfl.encoder(config, lambda _: epfl.elu))
    new, x = weights.load(TransformerEncoder, config, old.state_dict()), tokens(config)
    assert_close(new(x), old(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", DECODERS, ids=str)
def test_decoders_give_their_outputs(options):
    config = SIZE | options
    old = trained(epfl.decoder(config, lambda _: epfl.elu))
    new, x = weights.load(TransformerDecoder, config, old.state_dict()), tokens(config)
    memory = torch.randn(2, 9, old.layers[0].cross_attention.key_projection.in_features, dtype=torch.float64)
    assert_close(new(x, memory), old(x, memory), rtol=1e-10, atol=1e-10)


def test_with_their_epsilon(monkeypatch):
    monkeypatch.setattr(epfl, "EPSILON", 1e-6)
    for kind in ("linear", "causal-linear"):
        config = SIZE | {"attention_type": kind}
        old = trained(epfl.encoder(config, lambda _: epfl.elu))
        new, x = weights.load(TransformerEncoder, config, old.state_dict()), tokens(config)
        assert_close(new(x), old(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "causal-linear"])
def test_favor_comes_with_its_directions(kind):
    config = SIZE | {"attention_type": kind}
    old = trained(epfl.encoder(config, partial(epfl.Favor, num_features=8)))
    assert "layers.0.attention.inner_attention.feature_map.omega" in old.state_dict()
    config["feature_map"] = partial(HyperbolicFavorFeatureMap, num_features=8)
    new, x = weights.load(TransformerEncoder, config, old.state_dict()), tokens(config)
    assert_close(new(x), old(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["causal-linear", "causal-full"])
def test_an_encoder_goes_on_token_by_token(kind):
    """As their recurrent encoder, which has the same names."""
    config = SIZE | {"attention_type": kind}
    old = trained(epfl.encoder(config, lambda _: epfl.elu))
    new, x = weights.load(TransformerEncoder, config, old.state_dict()), tokens(config)
    state, ys = None, []
    for piece in x.split([10, *[1] * 13], 1):
        y, state = new.extend(piece, state)
        ys.append(y)
    assert_close(torch.cat(ys, 1), old(x), rtol=1e-10, atol=1e-10)


def test_a_decoder_goes_on_token_by_token():
    config = SIZE | DECODERS[0]
    old = trained(epfl.decoder(config, lambda _: epfl.elu))
    new, x = weights.load(TransformerDecoder, config, old.state_dict()), tokens(config)
    memory = torch.randn(2, 9, 12, dtype=torch.float64)
    y, state = new.extend(x[:, :1], memory=memory)
    ys = [y]
    for piece in x[:, 1:].split(1, 1):
        y, state = new.extend(piece, state)
        ys.append(y)
    assert_close(torch.cat(ys, 1), old(x, memory), rtol=1e-10, atol=1e-10)


class TestMasks:
    @pytest.mark.parametrize("kind", ATTENTIONS)
    def test_a_masked_token_is_a_missing_token(self, kind):
        model = TransformerEncoder(**SIZE, attention_type=kind).double().eval()
        x, mask = tokens(SIZE)[:1], torch.rand(1, 23) < 0.6
        assert_close(model(x, key_mask=mask)[mask], model(x[mask].unsqueeze(0))[0])

    def test_of_the_memory(self):
        model = TransformerDecoder(**SIZE, **DECODERS[0]).double().eval()
        x, memory, mask = tokens(SIZE)[:1], tokens(SIZE, 9)[:1], torch.rand(1, 9) < 0.6
        assert_close(model(x, memory, memory_mask=mask), model(x, memory[mask].unsqueeze(0)))


class TestErrors:
    def test_unknown_names(self):
        with pytest.raises(ValueError, match=r"one of full, causal-full, linear, causal-linear, but is 'reformer'"):
            TransformerEncoder(**SIZE, attention_type="reformer")
        with pytest.raises(ValueError, match="one of relu, gelu, but is 'swish'"):
            TransformerEncoder(**SIZE, activation="swish")

    def test_dropout_acts_in_training_only(self):
        model = TransformerEncoder(**SIZE, dropout=0.5).double()
        x = tokens(SIZE)
        assert not torch.equal(model(x), model(x))
        assert torch.equal(model.eval()(x), model(x))
