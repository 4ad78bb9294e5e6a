import pytest
from transformers import AutoConfig

from linattn import __version__
from linattn.integrations.transformers import LinattnConfig
from linattn.models import LanguageModelConfig

from .models import config, every_model


@every_model
def test_it_goes_to_json_and_back(name, tmp_path):
    expected = config(name)
    expected.save_pretrained(tmp_path)
    found = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(found, LinattnConfig)
    assert found.to_language_model() == expected.to_language_model()
    assert found.linattn_version == __version__


def test_transformers_names_mean_our_fields():
    ours = LanguageModelConfig(vocab_size=7, dim=48, depth=3, num_heads=6, num_key_heads=2, tie_embeddings=False)
    theirs = LinattnConfig(language_model=ours)
    assert theirs.vocab_size == 7
    assert theirs.hidden_size == 48
    assert theirs.num_hidden_layers == 3
    assert theirs.num_attention_heads == 6
    assert theirs.num_key_value_heads == 2
    assert theirs.intermediate_size == ours.hidden_dim
    assert theirs.tie_word_embeddings is False
    assert not hasattr(theirs, "max_position_embeddings")
    assert config("softmax").max_position_embeddings == 80
    assert LinattnConfig(language_model={"vocab_size": 7, "num_heads": 2}).num_key_value_heads == 2


def test_our_fields_have_one_place():
    for nothing in (None, 3, "elu", [7]):
        with pytest.raises(ValueError, match="needs language_model"):
            LinattnConfig(language_model=nothing)
    with pytest.raises(ValueError, match="depth, attention must be given inside language_model"):
        LinattnConfig(language_model={"vocab_size": 7}, attention="elu", depth=3)
    with pytest.raises(ValueError, match="unknown configuration 'layers'"):
        LinattnConfig(language_model={"vocab_size": 7, "layers": 3})
    with pytest.raises(ValueError, match="num_heads must divide dim"):
        LinattnConfig(language_model={"vocab_size": 7, "dim": 10, "num_heads": 3})


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "tie_word_embeddings"])
def test_transformers_names_cannot_contradict_our_fields(name, tmp_path):
    with pytest.raises(AttributeError, match=name):
        LinattnConfig(language_model={"vocab_size": 7}, **{name: 5})
    config("elu").save_pretrained(tmp_path)
    with pytest.raises(AttributeError, match=name):
        AutoConfig.from_pretrained(tmp_path, **{name: 5})


def test_a_newer_version_is_refused():
    with pytest.raises(ValueError, match=r"written by linattn 999\.0"):
        LinattnConfig(language_model={"vocab_size": 7}, linattn_version="999.0")
