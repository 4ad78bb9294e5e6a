"""Plans: their sizes are those of the conversion, and every refusal has a name."""

import json

import pytest
import torch
import transformers
from torch.testing import assert_close

from linattn.attention import ATTENTIONS, traits
from linattn.linearize import (
    convert,
    linearized_class,
    linearized_layers,
    load_linearized,
    plan,
)
from linattn.ops.nested import map_state
from tests.integrations.transformers.stock_attention.families import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    GROUPED,
    IMAGES,
    TEXT,
    TOKENS,
    WINDOWED,
    every,
    make,
)
from tests.integrations.transformers.stock_attention.test_attention import logits, tokens

from .test_conversion import batch_of


@every({**DECODERS, **ENCODERS, **IMAGES, **ENCODER_DECODERS})
def test_new_weights_are_those_of_the_conversion(family):
    model = make(family)
    before = model.num_parameters()
    made = plan(model, batch_of(model), method="hedgehog")
    convert(model, made)
    assert model.num_parameters() - before == made.new_weights > 0
    assert {layer.name for layer in made.replaced} == set(linearized_layers(model))
    assert [layer.index for layer in made.layers] == list(range(len(made.layers)))
    assert json.loads(json.dumps(made.to_dict()))["layers"][0]["name"] == made.layers[0].name
    assert str(made).count("hedgehog") == len(made.replaced)


@every({name: DECODERS[name] for name in ("llama", "gpt2")})
@pytest.mark.parametrize("method", ["taylor2", "local", "local+elu"])
def test_the_state_has_the_planned_size(family, method):
    model = make(family)
    made = plan(model, method=method, window=3, key_dim=4)
    convert(model, made, [{"input_ids": tokens()}])
    cache = model(tokens(1, 20)).cache
    for layer, planned in zip(cache.layers, made.layers, strict=True):
        sizes: list[int] = []
        map_state(lambda x, sizes=sizes: sizes.append(x.numel()), (layer.attention.state, layer.convolution.state))
        assert sum(sizes) == planned.state_numbers
    heads = family[1].get("num_key_value_heads", 4)
    assert made.layers[0].cache_numbers == 2 * heads * 8


@pytest.mark.parametrize(("channels", "kept"), [(16, None), (20, 16), (40, 20), (64, 32), (128, 32)])
def test_taylor_features_keep_half_of_a_head(channels, kept):
    sizes = {"hidden_size": channels, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    made = plan(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes)), method="taylor2")
    assert [layer.spec.key_dim for layer in made.layers if layer.spec] == [kept]


def test_encoders_and_cross_attention_have_no_convolution():
    model = make(ENCODER_DECODERS["bart"])
    made = plan(model, batch_of(model), method="elu")
    widths = [layer.spec.convolution for layer in made.layers if layer.spec]
    # two layers of the encoder, then self-attention and cross-attention in turn
    assert widths == [0, 0, 4, 0, 4, 0]


@pytest.mark.parametrize("method", [*ATTENTIONS, "local+elu"])
def test_what_is_planned_for_cross_attention_runs(method):
    """A method replaces those layers of an encoder, a decoder and between the two that it can; others have a reason."""
    model = make(ENCODER_DECODERS["bart"])
    batch = {"input_ids": tokens(2, 7), "decoder_input_ids": tokens(2, 5)}
    try:
        made = plan(model, batch, method=method)
    except ValueError as error:
        assert "no layer that linattn could replace" in str(error)
        return
    convert(model, made, [batch])
    assert model(**batch).logits.isfinite().all()
    crossing = [layer.reason for layer in made.layers][3::2]
    assert [reason is None for reason in crossing] == [traits(method).cross] * 2, crossing


def test_layers_with_a_sliding_window_stay():
    model = make(WINDOWED["gemma2"])
    reasons = [layer.reason for layer in plan(model, method="elu").layers]
    assert reasons == ["linear already, with its sliding window of 5", None]
    with pytest.raises(ValueError, match="no layer that linattn could replace: linear already"):
        plan(make(WINDOWED["mistral"]))


T5 = ("T5ForConditionalGeneration", {**TOKENS, "d_model": 32, "num_layers": 1, "num_heads": 4, "d_ff": 48})
SWIN = ("SwinModel", {"image_size": 16, "patch_size": 4, "embed_dim": 8, "depths": [1], "num_heads": [2]})
BLOOM = ("BloomForCausalLM", {**TOKENS, "hidden_size": 32, "n_layer": 1, "n_head": 4})
MOBILE = (
    "MobileBertModel",
    {**TEXT, "num_hidden_layers": 1, "embedding_size": 8, "intra_bottleneck_size": 16, "true_hidden_size": 16},
)
CAPPED = ("Gemma2ForCausalLM", {**DECODERS["gemma2"][1], "attn_logit_softcapping": 50.0})
REFUSED = {
    "t5": (T5, {}, "position_bias=tensor"),
    "swin": (SWIN, {}, "a mask of shape"),
    "bloom": (BLOOM, {}, "without transformers' AttentionInterface"),
    "mobilebert": (MOBILE, {}, "MobileBertSelfAttention takes no hidden_states"),
    "soft caps": (CAPPED, {}, "softcap=50.0: logits that never exist cannot be capped"),
    "keep": (DECODERS["llama"], {"keep": (1, 7)}, r"keep has \[7\], but the model's layers are 0 to 1"),
    "keep true": (DECODERS["llama"], {"keep": (True,)}, r"keep must be a whole number of at least 0, but is \(True,\)"),
    "keep all": (DECODERS["llama"], {"keep": (0, 1)}, "no layer that linattn could replace: kept"),
    "name": (DECODERS["llama"], {"method": "hedgehod"}, "did you mean 'hedgehog'"),
    "heads": (("LlamaForCausalLM", GROUPED), {"method": "local:1+elu:3"}, "do not divide 2 key heads evenly"),
    "no channels": (DECODERS["llama"], {"key_dim": 0}, "key_dim must be a whole number of at least 1, but is 0"),
    "channels": (DECODERS["llama"], {"key_dim": 9}, "key_dim must be from 1 to 8, the channels of a head, but is 9"),
    "window": (DECODERS["llama"], {"window": -1}, "window must be a whole number of at least 0, but is -1"),
    "convolution": (DECODERS["llama"], {"convolution": 1.5}, "convolution must be a whole number of at least 0, but"),
    "no name": (DECODERS["llama"], {"method": 3}, r"method must be a name.* are 3, True and \(\)"),
    "decay": (DECODERS["llama"], {"decay": "no"}, "decay true or false.* are 'taylor2', 'no' and"),
    "one layer": (DECODERS["llama"], {"keep": 1}, "keep a collection of layers, but they are 'taylor2', True and 1"),
    "batches": (DECODERS["llama"], {"batch": [{}]}, "a batch holds the arguments of a call by name.* but is a list"),
    "causal": (DECODERS["llama"], {"method": "linformer"}, "it cannot be causal"),
    "not causal": (ENCODERS["bert"], {"method": "retention"}, "retention is causal only"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refusals_have_names(case):
    family, options, reason = case
    model = make(family)
    batch = {"input_ids": tokens(), "decoder_input_ids": tokens()} if family is T5 else None
    batch = {"pixel_values": torch.randn(1, 3, 16, 16).double()} if family is SWIN else batch
    with pytest.raises(ValueError, match=reason):
        plan(model, **{"batch": batch, **options})
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_a_model_is_linearized_once():
    model = make(DECODERS["llama"])
    made = plan(model, method="elu")
    convert(model, made)
    for again in (plan, lambda model: convert(model, made)):
        with pytest.raises(ValueError, match="linearized already"):
            again(model)


def test_a_plan_is_for_one_model():
    with pytest.raises(ValueError, match=r"the plan is for another model: this one has no model\.layers"):
        convert(make(DECODERS["gpt2"]), plan(make(DECODERS["llama"]), method="elu"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": 64}, r"q_proj.weight \(64, 64\), not q_proj.weight \(32, 32\)"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, "head_dim 4, not head_dim 8"),
    ],
)
def test_a_plan_is_for_one_size(change, told):
    other = make(DECODERS["llama"], **change)
    with pytest.raises(ValueError, match=rf"the plan is for another model: model\.layers\.0\.self_attn has .*{told}"):
        convert(other, plan(make(DECODERS["llama"]), method="elu"))
    assert not linearized_layers(other)


def test_projections_need_batches():
    model = make(DECODERS["llama"])
    with pytest.raises(ValueError, match=r"key_dim needs batches that run model\.layers\.0\.self_attn"):
        convert(model, plan(model, key_dim=4))
    absent = {"input_ids": tokens(), "attention_mask": torch.zeros_like(tokens())}
    with pytest.raises(ValueError, match=r"key_dim needs batches that run model\.layers\.0\.self_attn"):
        convert(model, plan(model, key_dim=4), [absent])
    assert type(model) is transformers.LlamaForCausalLM


def test_a_conversion_that_fails_leaves_the_model():
    model, ids = make(DECODERS["llama"]), tokens()
    expected = logits(model, input_ids=ids)
    with pytest.raises(ValueError, match="input_ids"):
        convert(model, plan(model, method="elu"), [{"input_ids": ids}, {}])
    assert type(model) is transformers.LlamaForCausalLM and not linearized_layers(model)
    assert_close(logits(model, input_ids=ids), expected, rtol=0, atol=0)


def test_another_attention_function_is_refused():
    model = make(DECODERS["llama"])
    convert(model, plan(model, method="elu"))
    with pytest.raises(ValueError, match="a linearized model's attention is its own"):
        model.set_attn_implementation("sdpa")


def test_a_class_of_its_own_is_refused():
    class Mine(transformers.LlamaForCausalLM):
        pass

    model = Mine(transformers.LlamaConfig(**GROUPED))
    with pytest.raises(ValueError, match="Mine is not a class of transformers itself"):
        convert(model, plan(model, method="elu"))
    with pytest.raises(ValueError, match="'Mine' is not a model of transformers"):
        linearized_class("Mine")


def test_a_stock_folder_is_refused(tmp_path):
    make(DECODERS["llama"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"its config\.json has no linear_attention"):
        load_linearized(tmp_path)


def test_a_cache_of_keys_is_refused():
    model = make(DECODERS["llama"])
    convert(model, plan(model, method="elu"))
    with pytest.raises(ValueError, match="keeps states, which this cache has no place for"):
        model(tokens(), cache=transformers.DynamicCache())
