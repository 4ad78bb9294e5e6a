"""`replace_attention` on models of transformers: the interface is set, softmax changes nothing, refusals have names."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import InformerConfig, InformerModel

from linattn import SoftmaxAttention, TorchMultiheadAttention, replace_attention
from linattn.integrations.transformers import attended_modules

from .families import DECODERS, ENCODERS, IMAGES, VOCABULARY, every, make


def inputs(family):
    if family in IMAGES.values():
        return {"pixel_values": torch.randn(2, 3, 12, 12).double()}
    return {"input_ids": torch.randint(3, VOCABULARY, (2, 4))}


@every(
    {name: {**DECODERS, **ENCODERS, **IMAGES}[name] for name in ("llama", "gpt2", "opt", "bert", "modernbert", "vit")}
)
def test_softmax_is_the_model_and_the_modules_are_those_that_attend(family):
    model, given = make(family), inputs(family)
    expected = model(**given)[0]
    assert set(replace_attention(model, "softmax")) == set(attended_modules(model, **given))
    assert_close(model(**given)[0], expected)
    replace_attention(model, "elu")
    assert (model(**given)[0] - expected).abs().max() > 1e-3
    model.set_attn_implementation("sdpa")
    assert_close(model(**given)[0], expected, rtol=0, atol=0)


def test_a_model_inside_another_is_found():
    bert, given = make(ENCODERS["bert"]), inputs(ENCODERS["bert"])
    outer = nn.ModuleDict({"encoder": bert})
    assert all(name.startswith("encoder.") for name in replace_attention(outer, "elu"))
    assert len(attended_modules(bert, **given)) == 2


def test_a_backbone_without_attention_stays_as_it_is():
    from transformers import DetrConfig, DetrModel, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"], layer_type="basic"
    )
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, **sizes
    )
    model = DetrModel(config).double().eval()
    mask = torch.ones(2, 64, 64, dtype=torch.long)
    mask[1, 40:], mask[1, :, 30:] = 0, 0
    given = {"pixel_values": torch.randn(2, 3, 64, 64).double(), "pixel_mask": mask}
    expected = model(**given)[0]
    assert set(replace_attention(model, "softmax")) == set(attended_modules(model, **given))
    assert_close(model(**given)[0], expected)
    replace_attention(model, "elu")
    assert (model(**given)[0] - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "attention"),
    [
        ({"where": lambda name, module: True}, "elu"),
        ({"window": 5}, "local"),
        ({"max_length": 9}, "elu"),
        ({"return_weights": False}, "elu"),
        ({}, lambda module: SoftmaxAttention()),
    ],
)
def test_options_of_torchs_modules_are_refused(options, attention):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM attends through transformers.*one attention by name"):
        replace_attention(make(DECODERS["llama"]), attention, **options)


@pytest.mark.parametrize(("method", "reason"), [("hedgehog", "weights"), ("elo", r"no attention.*elu"), ("", "no att")])
def test_a_name_that_cannot_be_is_refused_before_anything_changes(method, reason):
    model = make(DECODERS["llama"])
    with pytest.raises(ValueError, match=reason):
        replace_attention(model, method)
    assert model.config._attn_implementation == "sdpa"


def test_one_model_that_is_refused_leaves_all_as_they_are():
    bert, sparse = make(ENCODERS["bert"]), InformerModel(InformerConfig(prediction_length=4, attention_type="prob"))
    before = bert.config._attn_implementation
    with pytest.raises(ValueError, match="InformerModel attends by functions of its own"):
        replace_attention(nn.ModuleList([bert, sparse]), "elu")
    assert bert.config._attn_implementation == before


def test_a_model_with_attention_of_its_own_is_refused():
    from transformers import BloomConfig, BloomModel

    with pytest.raises(ValueError, match=r"no nn.MultiheadAttention .* 1 × \S*modeling_bloom.BloomAttention\."):
        replace_attention(BloomModel(BloomConfig(vocab_size=37, hidden_size=32, n_layer=1, n_head=4)), "elu")


def test_torchs_attention_inside_a_model_of_transformers_is_replaced_as_before():
    from transformers import PreTrainedConfig, PreTrainedModel

    class Own(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)

    model = Own(PreTrainedConfig())
    assert set(replace_attention(model, "elu")) == {"layer.self_attn"}
    assert isinstance(model.layer.self_attn, TorchMultiheadAttention)
