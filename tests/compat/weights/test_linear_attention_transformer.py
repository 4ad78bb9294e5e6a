"""Weights of linear-attention-transformer itself, over its options: the same outputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from linattn.compat import weights
from linattn.compat.linear_attention_transformer import (
    ImageLinearAttention,
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
    LinformerSettings,
)
from tests.compat.weights.old import tables, trained

package = pytest.importorskip("linear_attention_transformer")
AutoregressiveWrapper = pytest.importorskip("linear_attention_transformer.autoregressive_wrapper").AutoregressiveWrapper
TheirImage = pytest.importorskip("linear_attention_transformer.images").ImageLinearAttention

SIZE = {"num_tokens": 19, "dim": 16, "depth": 2, "max_seq_len": 48, "heads": 4, "dim_head": 6}
SIZE |= {"local_attn_window_size": 8}
README = {
    "causal": True,
    "emb_dim": 10,
    "blindspot_size": 8,
    "n_local_attn_heads": 2,
    "reversible": True,
    "ff_chunks": 2,
    "ff_glu": True,
    "shift_tokens": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "the readme's": README,
    "the readme's, sequential": README | {"reversible": False},
    "both ways, shifted, gated": {"shift_tokens": True, "ff_glu": True, "n_local_attn_heads": (1, 4)},
    "heads of dim / heads": {"dim_head": None},
    "reversible": {"reversible": True, "n_local_attn_heads": 1},
    "embeddings": {"return_embeddings": True},
    "axial": {"attend_axially": True, "ff_glu": True, "ff_chunks": 2},
    "axial, causal, reversible": {"attend_axially": True, "causal": True, "reversible": True, "n_local_attn_heads": 1},
    "context": {"receives_context": True, "causal": True, "ff_glu": True},
    "context, reversible": {"receives_context": True, "reversible": True, "shift_tokens": True, "emb_dim": 8},
    "everything": {"receives_context": True, "attend_axially": True, "ff_glu": True, "n_local_attn_heads": 3},
    "Linformer": {"linformer_settings": {"k": 5}},
    "Linformer without its local heads": {"linformer_settings": {"k": 5}, "n_local_attn_heads": 2},
    "Linformer, shifted": {"linformer_settings": {"k": 5}, "shift_tokens": True, "reversible": True},
    "Linformer context": {
        "receives_context": True,
        "causal": True,
        "context_linformer_settings": {"seq_len": 20, "k": 5},
    },
    "learned positions": {"use_axial_pos_emb": False},
    "rotary": {"use_rotary_emb": True},
    "rotary, mixed heads": {"use_rotary_emb": True, "n_local_attn_heads": (1, 4)},
    "rotary, causal": {"use_rotary_emb": True, "causal": True, "n_local_attn_heads": 2},
    "rotary, blindspot": {"use_rotary_emb": True, "causal": True, "n_local_attn_heads": 2, "blindspot_size": 4},
    "rotary, context": {"use_rotary_emb": True, "causal": True, "receives_context": True, "reversible": True},
    "without effect": {"bucket_size": 3, "pkm_num_keys": 7, "pkm_layers": ()},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def of_theirs(config: dict[str, Any]) -> dict[str, Any]:
    kinds = {"linformer_settings": "LinformerSettings", "context_linformer_settings": "LinformerContextSettings"}
    return config | {key: getattr(package, kind)(**config[key]) for key, kind in kinds.items() if key in config}


def old_language_model(options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Theirs and its arguments."""
    config = of_theirs(SIZE | options)
    ignored = config.pop("bucket_size", None)
    model = trained(package.LinearAttentionTransformerLM(**config))
    tables(model)
    return model, config if ignored is None else config | {"bucket_size": ignored}


def context(options: dict[str, Any]) -> dict[str, Tensor]:
    return {"context": torch.randn(2, 20, 16, dtype=torch.float64)} if options.get("receives_context") else {}


@every_kind
def test_language_models_give_their_outputs(options):
    old, config = old_language_model(options)
    new = weights.load(LinearAttentionTransformerLM, config, old.state_dict())
    x, given = torch.randint(19, (2, 48)), context(options)
    assert_close(new(x, **given), old(x, **given), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "the readme's", "everything", "Linformer", "axial, causal, reversible"])
def test_stacks_give_their_outputs(name):
    options = {key: value for key, value in KINDS[name].items() if key != "emb_dim"}
    config = of_theirs({key: value for key, value in (SIZE | options).items() if key != "num_tokens"})
    old = trained(package.LinearAttentionTransformer(**config, bucket_size=3))
    new = weights.load(LinearAttentionTransformer, config | {"bucket_size": 3}, old.state_dict())
    x, given = torch.randn(2, 48, 16, dtype=torch.float64), context(options)
    assert_close(new(x, **given), old(x, **given), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "causal", "rotary, mixed heads", "context"])
def test_as_they_are_saved(name):
    """In float32, with the tables of the package."""
    config = SIZE | KINDS[name]
    old = package.LinearAttentionTransformerLM(**config).eval()
    new = weights.load(LinearAttentionTransformerLM, config, old.state_dict())
    x, given = torch.randint(19, (2, 48)), {key: value.float() for key, value in context(config).items()}
    assert new(x, **given).dtype == torch.float32
    assert_close(new(x, **given), old(x, **given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"norm_queries": False}, {"chan_out": 3, "value_dim": 5, "heads": 2}], ids=str)
def test_images_give_their_outputs(options):
    config = {"chan": 6, "key_dim": 4, "value_dim": 4} | options
    old = trained(TheirImage(**config))
    new = weights.load(ImageLinearAttention, config, old.state_dict())
    image = torch.randn(2, 6, 7, 5, dtype=torch.float64)
    assert_close(new(image), old(image), rtol=1e-10, atol=1e-10)


def test_in_its_wrappers():
    config = SIZE | {"causal": True}
    old = package.LinearAttentionTransformerLM(**config)
    # its wrapper has an Autopadder inside
    wrapped = AutoregressiveWrapper(old)
    checkpoint = {f"module.{name}": tensor for name, tensor in wrapped.state_dict().items()}
    assert all(name.startswith("module.net.net.") for name in checkpoint)
    x = torch.randint(19, (2, 48))
    new = weights.load(LinearAttentionTransformerLM, config, checkpoint)
    assert_close(new(x), old.eval()(x), rtol=1e-5, atol=1e-5)


def test_axial_positions_of_older_versions():
    """axial-positional-embedding 0.2.1 called its tables weights_0 and weights_1."""
    old, config = old_language_model({})
    checkpoint = {name.replace("pos_emb.weights.", "pos_emb.weights_"): x for name, x in old.state_dict().items()}
    x = torch.randint(19, (2, 48))
    assert_close(weights.load(LinearAttentionTransformerLM, config, checkpoint)(x), old(x), rtol=1e-10, atol=1e-10)


def test_it_goes_on_token_by_token():
    """Which theirs cannot."""
    old, config = old_language_model(KINDS["rotary, causal"])
    new = weights.load(LinearAttentionTransformerLM, config, old.state_dict())
    x, state, logits = torch.randint(19, (2, 48)), None, []
    for token in x.split([30, *[1] * 18], 1):
        y, state = new.extend(token, state)
        logits.append(y)
    assert_close(torch.cat(logits, 1), old(x), rtol=1e-10, atol=1e-10)


def test_a_loaded_model_is_saved_whole(tmp_path):
    """Linear heads with rotary positions are in no constructor."""
    old, config = old_language_model(KINDS["rotary, mixed heads"])
    new = weights.load(LinearAttentionTransformerLM, config, old.state_dict())
    torch.save(new, tmp_path / "model.pt")
    x, again = torch.randint(19, (2, 48)), torch.load(tmp_path / "model.pt", weights_only=False)
    assert_close(again(x), new(x), rtol=0, atol=0)


def test_rotary_positions_of_linear_heads_are_in_the_state_dict(tmp_path):
    """Weights that learned without them are refused by the name of what is missing; in a wrapper, names are longer."""
    old, config = old_language_model(KINDS["rotary, mixed heads"])
    new = weights.load(LinearAttentionTransformerLM, config, old.state_dict())
    fresh, x = nn.Sequential(LinearAttentionTransformerLM(**config).double().eval()), torch.randint(19, (2, 48))
    with pytest.raises(RuntimeError, match="rotary_linear_heads"):
        new.load_state_dict(fresh[0].state_dict())
    fresh.load_state_dict({f"0.{name}": tensor for name, tensor in new.state_dict().items()})
    assert_close(fresh(x), new(x), rtol=0, atol=0)
    torch.save(fresh, tmp_path / "model.pt")
    assert_close(torch.load(tmp_path / "model.pt", weights_only=False)(x), new(x), rtol=0, atol=0)


def test_product_keys_cannot_be_carried_over():
    with pytest.raises(ValueError, match="pkm_layers"):
        weights.load(LinearAttentionTransformerLM, SIZE | {"pkm_layers": (1,)}, {})


def test_our_settings_are_as_good():
    config = SIZE | {"linformer_settings": LinformerSettings(k=5)}
    old, theirs = old_language_model({"linformer_settings": {"k": 5}})
    mine, same = (weights.load(LinearAttentionTransformerLM, each, old.state_dict()) for each in (config, theirs))
    x = torch.randint(19, (2, 48))
    assert torch.equal(mine.eval()(x), same.eval()(x))
