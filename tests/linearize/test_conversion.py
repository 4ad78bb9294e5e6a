"""Conversion in place: softmax is the model, states are the parallel form, padding has no effect, undo is exact."""

import copy
import json
import pickle
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    modeling_utils,
    utils,
)

from linattn import replace_attention
from linattn.attention import ATTENTIONS, traits
from linattn.linearize import (
    Linearized,
    convert,
    linearized_layers,
    load_linearized,
    plan,
)
from tests.integrations.transformers.stock_attention.families import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    GROUPED,
    IMAGE,
    IMAGES,
    every,
    make,
)
from tests.integrations.transformers.stock_attention.test_attention import (
    drafted_tokens,
    logits,
    padded,
    tokens,
)

SOME = {name: DECODERS[name] for name in ("llama", "gpt2", "gpt_neox")}
METHODS = {
    "taylor2": {"key_dim": 4, "window": 3},
    "hedgehog": {"window": 0},
    "local+elu": {"window": 3},
    "t2r": {"convolution": 0, "decay": False},
    "softmax": {},
    "gated_delta": {"window": 5},
    "local+kda": {"window": 3, "key_dim": 6},
}
# each method in one family, and one method with every part in each family
CASES = {
    **{f"llama-{method}": (DECODERS["llama"], method) for method in METHODS},
    **{f"{name}-taylor2": (family, "taylor2") for name, family in DECODERS.items() if name not in ("llama", "gemma2")},
}


OWN_WEIGHTS = [
    name
    for name in ATTENTIONS
    if (traits(name).learned or traits(name).gated) and traits(name).causal and not traits(name).fixed_length
]


@pytest.mark.parametrize("method", OWN_WEIGHTS)
def test_a_name_that_cannot_hold_weights_says_how_to_train_new_ones(method):
    model, batch = make(DECODERS["llama"]), {"input_ids": tokens(), "labels": tokens()}
    before = {name for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match=r"of linattn\.linearize") as caught:
        replace_attention(model, method)
    (call,) = re.findall(r"`(.*)`", str(caught.value))
    eval(call, {"model": model, "plan": plan, "convert": convert})
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    # weights behind a matrix that begins at zero get their gradient in the second step
    for _ in range(3):
        losses.append(model(**batch).loss)
        losses[-1].backward()
        optimizer.step()
    new = {name: weight for name, weight in model.named_parameters() if name not in before}
    assert new and all(weight.grad.any() for weight in new.values())
    assert losses[2] < losses[1] < losses[0]


def converted(family: Any, method: str, **options: Any) -> Any:
    """Return a linearized model whose new parts are far from where they start, so that each has an effect."""
    model = make(family)
    convert(model, plan(model, method=method, **{**METHODS[method], **options}), [{"input_ids": tokens()}])
    with torch.no_grad():
        for module in linearized_layers(model).values():
            for weight in module.linear_attention.parameters():
                weight += 0.3 * torch.randn_like(weight)
    return model.eval()


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    """Return the linearized model of a case, for tests that leave it as it is."""
    torch.manual_seed(0)
    return converted(*CASES[request.param])


@every(DECODERS)
def test_a_conversion_to_softmax_is_the_model(family):
    model, inputs = make(family), padded((7, 10, 11), "left")
    model.set_attn_implementation("sdpa")
    expected = logits(model, **inputs)
    convert(model, plan(model, method="softmax"))
    present = inputs["attention_mask"].bool()
    assert_close(logits(model, **inputs)[present], expected[present])


@every({**SOME, **ENCODERS, **ENCODER_DECODERS})
def test_undo_gives_the_model_bit_by_bit(family):
    model = make(family)
    weights, settings, kind = copy.deepcopy(model.state_dict()), model.config.to_dict(), type(model)
    conversion = convert(model, plan(model, batch_of(model), method="hedgehog"))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1
    conversion.undo()
    assert type(model) is kind
    assert model.config.to_dict() == settings
    assert model.config._attn_implementation == "sdpa"
    assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert not linearized_layers(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_map_of_auto_classes_is_that_of_the_folder_and_then_the_old_one():
    model, before = make(DECODERS["llama"]), {"AutoConfig": "mine.Configuration"}
    model.config.auto_map = dict(before)
    conversion = convert(model, plan(model, method="elu"))
    assert all(hasattr(getattr(transformers, auto), "from_pretrained") for auto in model.config.auto_map)
    assert model.config.auto_map["AutoModelForCausalLM"] == "linattn_linearized.LlamaForCausalLM"
    conversion.undo()
    assert model.config.auto_map == before


def test_the_parts_of_a_model_keep_their_attention_functions():
    text, vision = LlamaConfig(**GROUPED), CLIPVisionConfig(**IMAGE)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision)).eval()
    functions = {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    model.set_attn_implementation(functions)
    batch = {"input_ids": tokens()}

    def found() -> dict[str, str]:
        parts = {name: getattr(model.config, name) if name else model.config for name in functions}
        return {name: part._attn_implementation for name, part in parts.items()}

    made = plan(model, batch, method="elu")
    assert found() == functions
    conversion = convert(model, made, [batch])
    assert set(found().values()) == {"linattn:softmax"}
    conversion.undo()
    assert found() == functions


def batch_of(model: Any) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 12, 12).double()}
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(3, 8, 40).double(), "decoder_input_ids": tokens(3, 5)}
    return {"input_ids": tokens()}


def test_pieces_make_the_whole(case):
    model, inputs = case, padded((7, 10, 11), "left")
    present = inputs["attention_mask"].bool()
    expected = logits(model, **inputs)[present]
    for cuts in ((1,) * 11, (5, 1, 5)):
        cache, found, seen = DynamicCache(config=model.config), [], 0
        for n in cuts:
            piece = {name: inputs[name][:, seen : seen + n] for name in ("input_ids", "position_ids")}
            seen += n
            mask = inputs["attention_mask"][:, :seen]
            found.append(model(**piece, attention_mask=mask, cache=cache).logits)
        assert_close(torch.cat(found, 1)[present], expected)


def test_drafts_change_no_token(case):
    alone, *drafted = drafted_tokens(case, input_ids=tokens(1, 6).repeat(1, 2))
    assert drafted == [alone] * 2


def test_cropped_is_never_read(case):
    """With the short convolution before the attention, and rows with missing tokens."""
    model, inputs = case, padded((7, 10, 11), "left")
    ids, places, mask = (inputs[name] for name in ("input_ids", "position_ids", "attention_mask"))
    expected = logits(model, **inputs)[:, 5:]
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()

    def read(start: int, stop: int) -> torch.Tensor:
        piece = {"input_ids": ids[:, start:stop], "position_ids": places[:, start:stop]}
        return model(**piece, attention_mask=mask[:, :stop], cache=cache).logits

    read(0, 11)
    cache.crop(-6)
    assert_close(read(5, 11), expected)


def test_padding_has_no_effect(case):
    for side in ("left", "right"):
        inputs = padded((4, 10, 11), side)
        found, present = logits(case, **inputs), inputs["attention_mask"].bool()
        for row, real in enumerate(present):
            assert_close(found[row, real], logits(case, input_ids=inputs["input_ids"][row, real][None])[0])


def test_a_packed_document_is_alone(case):
    if case.config.model_type == "opt":
        pytest.skip("stock OPT has no packed rows")
    model, rows = case, tokens(2)
    places = torch.cat([torch.arange(4), torch.arange(7)]).expand(2, -1)
    found = logits(model, input_ids=rows, position_ids=places)
    for row in range(2):
        alone = [logits(model, input_ids=document[None])[0] for document in rows[row].split((4, 7))]
        assert_close(found[row], torch.cat(alone))


@every(SOME)
def test_a_mixed_model_generates_as_without_cache(family):
    model, inputs = converted(family, "taylor2", keep=(1,)), padded((7, 10, 11), "left")
    del inputs["position_ids"]
    options = {**inputs, "max_new_tokens": 6, "do_sample": False}
    for beams in (1, 3):
        expected = model.generate(**options, num_beams=beams, use_cache=False)
        assert_close(model.generate(**options, num_beams=beams), expected)


@every(SOME)
@pytest.mark.parametrize("method", ["taylor2", "local+elu"])
def test_a_loaded_model_is_the_saved_one(family, method, tmp_path):
    model, ids = converted(family, method, keep=(0,)), tokens()
    expected = logits(model, input_ids=ids)
    model.save_pretrained(tmp_path)
    for loaded in (
        load_linearized(tmp_path, dtype=torch.float64),
        load_linearized(tmp_path.parent, dtype=torch.float64, subfolder=tmp_path.name),
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, trust_remote_code=True),
    ):
        assert isinstance(loaded, Linearized)
        assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
        assert_close(logits(loaded.eval(), input_ids=ids), expected)


def test_weights_of_an_earlier_save_are_not_loaded(tmp_path):
    model = converted(DECODERS["llama"], "hedgehog")
    for size in ("50GB", "1KB"):
        torch.nn.init.normal_(model.get_input_embeddings().weight)
        model.save_pretrained(tmp_path, max_shard_size=size)
    loaded = load_linearized(tmp_path, dtype=torch.float64)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("again", [False, True], ids=["new", "saved before"])
def test_an_uploaded_folder_can_be_loaded(again, tmp_path, monkeypatch):
    model, ids = converted(DECODERS["llama"], "hedgehog"), tokens()
    folder, hub = tmp_path / "model", tmp_path / "hub"
    hub.mkdir()

    class Api:
        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, operations: Any, **_: Any) -> None:
            for each in operations:
                shutil.copy(each.path_or_fileobj, hub / each.path_in_repo)

    for module in (modeling_utils, utils.hub):
        monkeypatch.setattr(module, "hf_api", Api)
    monkeypatch.setattr(modeling_utils, "create_and_tag_model_card", lambda *_, **__: ModelCard(""))
    if again:
        model.save_pretrained(folder)
    model.save_pretrained(folder, push_to_hub=True)
    loaded = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float64, trust_remote_code=True)
    assert_close(logits(loaded.eval(), input_ids=ids), logits(model, input_ids=ids))


@every({**SOME, **ENCODERS, **IMAGES})
def test_transformers_refuses_to_make_the_softmax_model_of_a_folder(family, tmp_path):
    model = make(family)
    stock = type(model)
    convert(model, plan(model, batch_of(model), method="hedgehog"))
    model.save_pretrained(tmp_path)
    for make_softmax in (AutoModel.from_pretrained, stock.from_pretrained):
        for options in ({}, {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}):
            with pytest.raises(ValueError, match=r"load it with trust_remote_code=True.*is not supported"):
                make_softmax(tmp_path, **options)
    with pytest.raises(ValueError, match="'sdpa': a linearized model's attention is its own"):
        AutoModel.from_pretrained(tmp_path, trust_remote_code=True, attn_implementation="sdpa")
    loaded = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert loaded.config.to_dict()["experts_implementation"] == model.config.to_dict()["experts_implementation"]


def test_a_mixture_of_experts_may_choose_how_they_run(tmp_path):
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    model = make(("MixtralForCausalLM", {**GROUPED, **experts}), torch.float32)
    convert(model, plan(model, method="hedgehog"))
    model.save_pretrained(tmp_path)
    ids = tokens()
    expected = logits(model, input_ids=ids)
    for options in ({}, {"experts_implementation": "eager"}):
        loaded = load_linearized(tmp_path, **options)
        assert loaded.config._experts_implementation == options.get("experts_implementation", "grouped_mm")
        assert_close(logits(loaded.eval(), input_ids=ids), expected)


@every(SOME)
def test_pickle_and_copies_keep_the_model(family):
    model, ids = converted(family, "taylor2"), tokens()
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(copied) is type(model)
        assert_close(logits(copied, input_ids=ids), logits(model, input_ids=ids), rtol=0, atol=0)


def test_a_folder_of_a_later_version_is_refused(tmp_path):
    converted(DECODERS["llama"], "hedgehog").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text("utf-8"))
    settings["linear_attention"]["linattn_version"] = "99.0.0"
    path.write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match=r"99\.0\.0"):
        load_linearized(tmp_path)


@every({**SOME, **ENCODERS, **IMAGES})
def test_a_kept_layer_is_untouched(family):
    model = make(family)
    before = copy.deepcopy(model.state_dict())
    convert(model, plan(model, batch_of(model), method="hedgehog", keep=(1,)))
    assert len(linearized_layers(model)) == 1
    assert_close({name: model.state_dict()[name] for name in before}, before, rtol=0, atol=0)
