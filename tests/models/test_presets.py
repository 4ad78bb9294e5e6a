"""Published architectures by name: each is a model like any other, and the page shows what the code has."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from linattn.models import PRESETS, LanguageModel, LanguageModelConfig, next_token_loss
from linattn.models.config import preset_fields

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {"vocab_size": 13, "dim": 16, "depth": 5, "num_heads": 4}
every_preset = pytest.mark.parametrize("name", PRESETS)


def preset_model(name: str) -> LanguageModel:
    return LanguageModel(LanguageModelConfig.preset(name, **SIZES)).double()


@every_preset
@torch.no_grad()
def test_pieces_make_the_whole(name):
    model, tokens = preset_model(name).eval(), torch.randint(13, (2, 90))
    pieces, state = [], None
    for piece in tokens.split((1, 70, 19), 1):
        logits, state = model.extend(piece, state)
        pieces.append(logits)
    assert_close(torch.cat(pieces, 1), model(tokens))


@every_preset
def test_a_step_lowers_the_loss_through_every_weight(name):
    model, tokens = preset_model(name), torch.randint(13, (4, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = next_token_loss(model(tokens), tokens)
    before.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    optimizer.step()
    assert next_token_loss(model(tokens), tokens) < before


@every_preset
def test_a_saved_model_comes_back(name, tmp_path):
    model, tokens = preset_model(name).eval(), torch.randint(13, (2, 20))
    model.save(tmp_path)
    loaded = LanguageModel.load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


def test_layers_repeat_up_to_the_depth():
    hybrid = LanguageModelConfig.preset("kimi_linear", vocab_size=7, depth=6)
    assert hybrid.layers == ("kda", "kda", "kda", "softmax", "kda", "kda")


def test_widths_follow_the_sizes():
    config = LanguageModelConfig.preset("gated_deltanet", vocab_size=7, dim=64, num_heads=2)
    assert (config.key_dim, config.head_dim) == (24, 48)


@every_preset
def test_options_win_over_the_preset(name):
    own = {"attention": "kda", "rotary": 100.0, "norm": "layer", "key_dim": 6, "head_dim": 10, "gate_function": "silu"}
    config = LanguageModelConfig.preset(name, vocab_size=7, **own)
    assert {field: getattr(config, field) for field in own} == own


def test_other_names_are_refused():
    with pytest.raises(ValueError, match=r"preset must be one of transformer, .*'gated_deltanet'\?"):
        LanguageModelConfig.preset("gated_delta_nets", vocab_size=7)
    with pytest.raises(ValueError, match="unknown configuration 'width'"):
        LanguageModelConfig.preset("gla", vocab_size=7, width=3)
    with pytest.raises(ValueError, match="num_heads must be a whole number"):
        LanguageModelConfig.preset("gla", vocab_size=7, num_heads=0)


@every_preset
def test_a_preset_says_only_what_is_not_the_default(name):
    defaults = {field.name: field.default for field in dataclasses.fields(LanguageModelConfig)}
    fields = preset_fields(name, {})
    assert fields.keys() <= defaults.keys() and all(fields[field] != defaults[field] for field in fields)


def row(name: str) -> str:
    preset = PRESETS[name]
    widths = {"keys": preset.key_width, "values": preset.value_width}
    parts = [f"`{', '.join(preset.attention)}`"]
    parts += [f"{part} of {width:g} · `dim`" for part, width in widths.items() if width != 1]
    parts += [f"`{option}={value!r}`" for option, value in preset.options.items()]
    return f"| `{name}` | [{preset.paper}]({preset.url}) | {', '.join(parts)} | {preset.differences} |"


@every_preset
def test_the_page_has_the_row(name):
    assert row(name) in (DOCS / "methods.md").read_text("utf-8").splitlines()
