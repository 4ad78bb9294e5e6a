"""What a mask says of causality, and the models that are refused before they run."""

import pytest
import torch
from torch.testing import assert_close
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from linattn.integrations.transformers import register_attention

from .families import DECODERS, GROUPED, SEQ2SEQ, TEXT, make

SOFTMAX, ELU = register_attention("softmax"), register_attention("elu")


def llama():
    model = make(DECODERS["llama"])
    model.set_attn_implementation(SOFTMAX)
    return model


def options(model, n: int = 6):
    return {"config": model.config, "inputs_embeds": torch.zeros(2, n, 32), "cache": None}


def padding(n: int = 6):
    return (torch.arange(n) < torch.tensor([[n], [n - 2]])).long()


def test_a_causal_mask_makes_any_module_causal():
    model, x = llama(), torch.randn(2, 6, 32).double()
    layer, positions = model.model.layers[0].self_attn, model.model.rotary_emb(x, torch.arange(6)[None])
    mask = create_causal_mask(**options(model), attention_mask=padding())
    expected = layer(x, position_embeddings=positions, attention_mask=mask)[0]
    layer.is_causal = False
    assert_close(layer(x, position_embeddings=positions, attention_mask=mask)[0], expected)
    # as in modules that compute is_causal from whether there is a mask
    assert_close(layer(x, position_embeddings=positions, attention_mask=mask, is_causal=False)[0], expected)


def test_a_causal_module_with_a_mask_that_is_not_is_refused():
    model, x = llama(), torch.randn(2, 6, 32).double()
    layer, positions = model.model.layers[0].self_attn, model.model.rotary_emb(x, torch.arange(6)[None])
    mask = create_bidirectional_mask(**options(model), attention_mask=padding())
    with pytest.raises(ValueError, match="LlamaAttention is causal, but its mask is not"):
        layer(x, position_embeddings=positions, attention_mask=mask)


def test_a_mask_that_was_made_is_made_no_second_time():
    model, positions = llama(), torch.tensor([0, 1, 0, 1, 2, 3]).expand(2, -1)
    for given in ({"position_ids": positions, "attention_mask": None}, {"attention_mask": padding()}):
        mask = create_causal_mask(**options(model), **given)
        assert create_causal_mask(**options(model), attention_mask=mask) is mask


INDEXED = {**GROUPED, **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8)}
SERIES = {"prediction_length": 4, "context_length": 8, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
REFUSED = {
    "indexed": ("DeepseekV32ForCausalLM", {**INDEXED, "num_key_value_heads": 4}, "keys that an index chooses"),
    "git": ("GitForCausalLM", TEXT, "without transformers' AttentionInterface"),
    "informer": ("InformerModel", SERIES, 'attention_type="full"'),
    "nllb_moe": ("NllbMoeForConditionalGeneration", {**SEQ2SEQ, "num_experts": 2}, "router_ignore_padding_tokens=True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_by_name_before_it_runs(name):
    kind, sizes, message = REFUSED[name]
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        make((kind, {**sizes, "attn_implementation": ELU}))
    with torch.device("meta"):
        model = make((kind, sizes))
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(ELU)
