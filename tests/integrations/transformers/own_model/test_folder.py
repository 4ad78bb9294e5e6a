import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from linattn.integrations.transformers import LinattnForCausalLM
from linattn.models import LanguageModel

from .models import every_model, make, prompts


@every_model
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_our_folder_loads_in_transformers(name, dtype, tmp_path):
    ours, tokens = make(name, dtype).model, prompts()
    ours.save(tmp_path)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(theirs, LinattnForCausalLM)
    assert not any(info.values())
    assert not theirs.training
    assert_close(theirs.model.state_dict(), ours.state_dict(), rtol=0, atol=0)
    assert_close(theirs(tokens, use_cache=False).logits, ours(tokens))
    assert theirs.generate(tokens, max_new_tokens=3, do_sample=False).shape == (3, 12)


@every_model
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_transformers_folder_loads_in_ours(name, dtype, tmp_path):
    theirs, tokens = make(name, dtype), prompts()
    theirs.save_pretrained(tmp_path)
    ours = LanguageModel.load(tmp_path)
    assert_close(ours.state_dict(), theirs.model.state_dict(), rtol=0, atol=0)
    assert_close(ours(tokens), theirs(tokens, use_cache=False).logits)


@every_model
def test_both_write_the_same_weights_and_configuration(name, tmp_path):
    model = make(name, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    model.model.save(tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert_close(theirs, ours, rtol=0, atol=0)
    theirs, ours = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "ours"))
    assert {key: theirs[key] for key in ours} == ours


@every_model
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_can_be_chosen(name, dtype, tmp_path):
    model, tokens = make(name, torch.float32), prompts()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype
    converted = model.to(dtype)
    assert_close(loaded.state_dict(), converted.state_dict(), rtol=0, atol=0)
    assert_close(loaded(tokens).logits, converted(tokens).logits)


@every_model
def test_weights_are_read_without_drawing_any(name, tmp_path):
    make(name).save_pretrained(tmp_path)
    state = torch.get_rng_state()
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


@every_model
def test_weights_that_the_file_lacks_are_drawn_anew(name, tmp_path):
    """transformers warns of them; they must not be what memory happened to hold, nor change the others."""
    model = make(name, torch.float32)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    missing = [key for key in weights if ".blocks.1." in key]
    rest = {key: weights[key] for key in weights if key not in missing}
    save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert sorted(info["missing_keys"]) == sorted(missing)
    for key, tensor in loaded.state_dict().items():
        if key not in missing:
            assert_close(tensor, weights[key], rtol=0, atol=0)
        elif key.endswith("o_proj.weight"):
            assert 0.008 < tensor.std() < 0.012
        assert tensor.isfinite().all()
    assert loaded(prompts()).logits.isfinite().all()


def test_weights_of_another_shape_are_refused(tmp_path):
    model = make("elu")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embedding.weight"] = weights["model.embedding.weight"][:5].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match="mismatched"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("sizes", [("50GB", "1KB"), ("1KB", "50GB"), ("1KB", "2KB")])
def test_weights_of_an_earlier_save_are_not_loaded(sizes, tmp_path):
    """transformers leaves the single file beside several new ones, and loads it."""
    for size in sizes:
        model = make("elu", torch.float32)
        torch.nn.init.normal_(model.model.embedding.weight)
        model.save_pretrained(tmp_path, max_shard_size=size)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (tmp_path / "model.safetensors").exists() == (sizes[-1] == "50GB")


def test_the_vocabulary_that_grew_is_saved(tmp_path):
    model = make("elu", torch.float32)
    model.resize_token_embeddings(37)
    model.save_pretrained(tmp_path)
    assert LanguageModel.load(tmp_path).config.vocab_size == 37
    tokens = torch.tensor([[36, 1]])
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits)
