"""Our attention inside stock models: softmax is sdpa, states equal the run without cache, and refusals have names."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin

from linattn import replace_attention
from linattn.attention import ATTENTIONS, traits
from linattn.integrations.transformers import attended_modules, byte_tokenizer, register_attention
from linattn.integrations.transformers.state_layer import StateLayer
from linattn.integrations.transformers.stock_attention.hooks import METHODS
from linattn.ops.nested import map_state

from .families import (
    AUDIO,
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    GROUPED,
    IMAGES,
    TEXT,
    VOCABULARY,
    WINDOWED,
    every,
    make,
)

# two kinds of states in one: each family passes its own masks and positions, and none knows the method
MIXTURE = "linattn:local:2+taylor2:2"
PAIRS = {"llama-elu": (DECODERS["llama"], "linattn:elu")} | {
    name: (family, MIXTURE) for name, family in DECODERS.items()
}


def every_decoder(*, without: str = "") -> pytest.MarkDecorator:
    pairs = {name: pair for name, pair in PAIRS.items() if name != without}
    return pytest.mark.parametrize(("family", "method"), pairs.values(), ids=pairs)


def tokens(b: int = 3, n: int = 11) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (b, n))


def padded(lengths: tuple[int, ...], side: str, n: int = 11) -> dict[str, torch.Tensor]:
    """Rows of these lengths with junk in the padding, and positions that count the present tokens, as generate's."""
    place = torch.arange(n)
    starts = torch.tensor([n - length if side == "left" else 0 for length in lengths])[:, None]
    mask = (place >= starts) & (place < starts + torch.tensor(lengths)[:, None])
    return {
        "input_ids": tokens(len(lengths), n),
        "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    output = model(**inputs, use_cache=False)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def both(model: Any, present: torch.Tensor | None = None, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs at present tokens, through sdpa and through our softmax."""
    model.set_attn_implementation("sdpa")
    expected = logits(model, **inputs)
    model.set_attn_implementation("linattn:softmax")
    found = logits(model, **inputs)
    return (found, expected) if present is None else (found[present], expected[present])


@every({**DECODERS, **{f"{name}_window": family for name, family in WINDOWED.items()}})
def test_softmax_in_a_decoder_is_sdpa(family):
    model = make(family)
    assert_close(*both(model, input_ids=tokens()))
    for side in ("left", "right"):
        inputs = padded((7, 10, 11), side)
        assert_close(*both(model, inputs["attention_mask"].bool(), **inputs))
    documents = torch.cat([torch.arange(4), torch.arange(7)]).expand(3, -1)
    assert_close(*both(model, input_ids=tokens(), position_ids=documents))


@every(ENCODERS)
def test_softmax_in_an_encoder_is_sdpa(family):
    model = make(family)
    inputs = {"input_ids": tokens(), "attention_mask": padded((7, 10, 11), "right")["attention_mask"]}
    present = inputs["attention_mask"].bool()
    model.set_attn_implementation("sdpa")
    expected = model(**inputs).last_hidden_state[present]
    model.set_attn_implementation("linattn:softmax")
    assert_close(model(**inputs).last_hidden_state[present], expected)
    assert len(attended_modules(model, **inputs)) == 2


@every({**IMAGES, **AUDIO})
def test_softmax_on_images_and_audio_is_sdpa(family):
    model = make(family)
    inputs, heard = {"pixel_values": torch.randn(2, 3, 12, 12).double()}, slice(None)
    if family in AUDIO.values():
        present = torch.arange(200) < torch.tensor([[200], [140]])
        inputs, heard = {"input_values": torch.randn(2, 200).double(), "attention_mask": present.long()}, slice(0, 8)
    model.set_attn_implementation("sdpa")
    expected = model(**inputs).last_hidden_state[:, heard]
    model.set_attn_implementation("linattn:softmax")
    assert_close(model(**inputs).last_hidden_state[:, heard], expected)
    model.set_attn_implementation("linattn:local:2+favor:2")
    assert model(**inputs).last_hidden_state.isfinite().all()


def source(family: Any) -> dict[str, torch.Tensor]:
    if family is ENCODER_DECODERS["whisper"]:
        return {"input_features": torch.randn(3, 8, 40).double()}
    return {key: padded((7, 10, 11), "right")[key] for key in ("input_ids", "attention_mask")}


@every(ENCODER_DECODERS)
def test_softmax_in_an_encoder_decoder_is_sdpa(family):
    model, target = make(family), padded((6, 9, 8), "left", 9)
    masks = {"decoder_input_ids": target["input_ids"], "decoder_attention_mask": target["attention_mask"]}
    assert_close(*both(model, target["attention_mask"].bool(), **source(family), **masks))


@every(ENCODER_DECODERS)
@pytest.mark.parametrize("method", ["linattn:elu", "linattn:taylor2:2+favor:2"])
def test_an_encoder_decoder_generates_from_states(family, method):
    model, inputs = make(family), source(family)
    model.set_attn_implementation(method)
    options = {"max_new_tokens": 6, "do_sample": False}
    for beams in (1, 3):
        found = model.generate(**inputs, **options, num_beams=beams)
        assert_close(found, model.generate(**inputs, **options, num_beams=beams, use_cache=False))
    options["return_dict_in_generate"] = True
    # not Whisper's own generate, which cuts its cache's keys into rows
    cache = [GenerationMixin.generate(model, **inputs, **{**options, "max_new_tokens": n}).cache for n in (3, 6)]
    assert size(cache[0].self_attention_cache) == size(cache[1].self_attention_cache) > 0
    assert size(cache[0].cross_attention_cache) == size(cache[1].cross_attention_cache) > 0


def size(cache: Any) -> int:
    """Return the number of bytes that the layers' states keep alive."""
    storages = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for layer in cache.layers:
        map_state(note, (layer.attention.state, None if layer.keys is None else layer.keys.new, layer.values))
    return sum(storages.values())


@every_decoder()
def test_pieces_make_the_whole(family, method):
    model, inputs = make(family), padded((7, 10, 11), "left")
    model.set_attn_implementation(method)
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


@every_decoder()
def test_padding_has_no_effect(family, method):
    model, lengths = make(family), (4, 10, 11)
    model.set_attn_implementation(method)
    for side in ("left", "right"):
        inputs = padded(lengths, side)
        found, present = logits(model, **inputs), inputs["attention_mask"].bool()
        for row, real in enumerate(present):
            assert_close(found[row, real], logits(model, input_ids=inputs["input_ids"][row, real][None])[0])


# stock OPT has no packed rows: its position_ids do not reach its masks
@every_decoder(without="opt")
def test_a_packed_document_is_alone(family, method):
    model, rows = make(family), tokens(2)
    model.set_attn_implementation(method)
    lengths = ((4, 7), (1, 10))
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    found = logits(model, input_ids=rows, position_ids=places)
    for row, ns in zip(range(2), lengths, strict=True):
        alone = [logits(model, input_ids=document[None])[0] for document in rows[row].split(ns)]
        assert_close(found[row], torch.cat(alone))


@every_decoder()
def test_generation_equals_the_run_without_cache(family, method):
    model, inputs = make(family), padded((7, 10, 11), "left")
    model.set_attn_implementation(method)
    del inputs["position_ids"]
    options = {**inputs, "max_new_tokens": 6, "do_sample": False}
    for beams in (1, 3):
        expected = model.generate(**options, num_beams=beams, use_cache=False)
        assert_close(model.generate(**options, num_beams=beams), expected)
    assert_close(model.generate(**options, num_beams=3, prefill_chunk_size=4), expected)


def drafted_tokens(model: Any, **inputs: Any) -> list[list[list[int]]]:
    """Return the greedy tokens alone, with prompt lookup, and with the model as its own assistant."""
    # Whisper changes the settings of its assistant
    drafts = ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": copy.deepcopy(model)})
    return [model.generate(**inputs, max_new_tokens=8, do_sample=False, **draft).tolist() for draft in drafts]


@every_decoder()
def test_drafts_change_no_token(family, method):
    model = make(family)
    model.set_attn_implementation(method)
    alone, *drafted = drafted_tokens(model, input_ids=tokens(1, 6).repeat(1, 2))
    assert drafted == [alone] * 2


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_token_of_any_method(method):
    model = make(DECODERS["llama"])
    model.set_attn_implementation(f"linattn:{method}")
    alone, *drafted = drafted_tokens(model, input_ids=tokens(1, 6).repeat(1, 2))
    assert drafted == [alone] * 2


@every(ENCODER_DECODERS)
def test_drafts_change_no_token_of_an_encoder_decoder(family):
    model = make(family)
    model.set_attn_implementation("linattn:elu")
    speech = model.main_input_name == "input_features"
    inputs = {"input_features": torch.randn(1, 8, 40).double()} if speech else {"input_ids": tokens(1)}
    alone, *drafted = drafted_tokens(model, **inputs)
    assert drafted == [alone] * 2
    if speech:
        # Whisper cuts its outputs into rows, and states stay whole
        options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
        cache = model.generate(**inputs, **options, force_unique_generate_call=True).cache
        assert cache.get_seq_length() > 0 and isinstance(cache.self_attention_cache.layers[0], StateLayer)
        with pytest.raises(ValueError, match="that of one row, but there are 2"):
            model.generate(torch.randn(2, 8, 40).double(), **options, force_unique_generate_call=True)


def test_stop_strings_are_taken():
    model, ids = make(DECODERS["llama"], vocab_size=257), tokens(1)
    model.set_attn_implementation("linattn:elu")
    options = {"max_new_tokens": 8, "do_sample": False}
    found = model.generate(ids, **options, stop_strings=["nowhere"], tokenizer=byte_tokenizer())
    assert_close(found, model.generate(ids, **options))


@every_decoder()
def test_cropped_is_never_read(family, method):
    model, inputs = make(family), padded((7, 10, 11), "left")
    model.set_attn_implementation(method)
    expected = logits(model, **inputs)[:, 8:]
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()

    def read(start: int, stop: int, ids: torch.Tensor = inputs["input_ids"]) -> torch.Tensor:
        piece = {"input_ids": ids[:, start:stop], "position_ids": inputs["position_ids"][:, start:stop]}
        return model(**piece, attention_mask=inputs["attention_mask"][:, :stop], cache=cache).logits

    others = tokens()
    read(0, 8)
    for stop in (11, 9):
        read(8, stop, others)
        cache.crop(8 - stop)
        assert cache.get_seq_length() == 8
        assert_close(read(8, 11), expected)
        cache.crop(-3)


@pytest.mark.parametrize("method", ["elu", "favor", "taylor2", "local", "retention", "local:2+efficient:2"])
def test_the_state_of_generation_does_not_grow(method):
    model = make(DECODERS["llama"])
    model.set_attn_implementation(f"linattn:{method}")
    sizes = []
    for n in (140, 150):
        options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
        sizes.append(size(model.generate(tokens(2, n), **options).cache))
    assert sizes[0] == sizes[1] > 0


def test_a_window_is_kept_in_states_too():
    for family in WINDOWED.values():
        model, inputs = make(family), padded((7, 10, 11), "left")
        options = {"max_new_tokens": 6, "do_sample": False, **inputs}
        del options["position_ids"]
        for method in ("softmax", "local"):
            model.set_attn_implementation(f"linattn:{method}")
            expected = model.generate(**options, use_cache=False)
            assert_close(model.generate(**options), expected)


def test_no_cache_for_attention_that_sees_the_future():
    model = make(DECODERS["llama"])
    model.set_attn_implementation("linattn:elu")
    cache = model(tokens(), is_causal=False).cache
    with pytest.raises(ValueError, match="use_cache=False"):
        model(tokens(3, 1), is_causal=False, cache=cache)


def test_a_model_that_attends_twice_to_its_keys_has_no_state():
    model, ids = make(("DiffLlamaForCausalLM", GROUPED)), tokens()
    assert_close(*both(model, input_ids=ids))
    with pytest.raises(ValueError, match="11 tokens came into the cache, but 22 into its state"):
        model(ids)


def test_a_cache_of_all_keys_gives_the_same():
    model, ids = make(DECODERS["llama"]), tokens()
    model.set_attn_implementation("linattn:elu")
    expected, cache = logits(model, input_ids=ids), DynamicCache()
    found = [model(piece, cache=cache).logits for piece in ids.split((4, 1, 6), 1)]
    assert_close(torch.cat(found, 1), expected)


def test_a_copied_cache_goes_its_own_way():
    model, ids, more = make(DECODERS["llama"]), tokens(), tokens(3, 4)
    model.set_attn_implementation("linattn:local+elu")
    with torch.no_grad():
        cache = model(ids).cache
    other = copy.deepcopy(cache)
    expected = model(more, cache=cache).logits
    assert_close(model(more, cache=other).logits, expected)


def test_gradients_of_softmax_are_those_of_sdpa():
    model, inputs = make(DECODERS["llama"]).train(), padded((7, 10, 11), "right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    gradients = []
    for name in ("sdpa", "linattn:softmax"):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert_close(*gradients)


def test_a_folder_loads_with_our_attention(tmp_path):
    model, ids = make(DECODERS["llama"], torch.float32), tokens()
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("linattn:local:2+exp:2")
    found = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="linattn:local:2+exp:2")
    assert_close(logits(found, input_ids=ids), logits(model, input_ids=ids))
    assert len(attended_modules(found, input_ids=ids)) == 2


def test_the_kwarg_wins_over_the_attribute():
    model = make(DECODERS["llama"])
    found, expected = both(model, input_ids=tokens(), is_causal=False)
    assert_close(found, expected)
    assert not torch.allclose(found, logits(model, input_ids=tokens()))


def test_going_back_gives_the_original():
    model, ids = make(DECODERS["llama"]), tokens()
    expected = logits(model, input_ids=ids)
    model.set_attn_implementation("linattn:elu")
    assert not torch.allclose(logits(model, input_ids=ids), expected)
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, input_ids=ids), expected)


OTHERS = {
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY}),
    "deberta": ("DebertaV2Model", TEXT),
}


@every(OTHERS)
def test_models_with_attention_of_their_own_are_refused(family):
    with pytest.raises(ValueError, match="without transformers' AttentionInterface"):
        make(family).set_attn_implementation("linattn:elu")
    with pytest.raises(ValueError, match="without transformers' AttentionInterface"):
        make(family, attn_implementation="linattn:elu")


@torch.no_grad()
def test_softmax_does_not_continue_a_state():
    model = make(DECODERS["llama"], attn_implementation="linattn:elu")
    past = model(tokens()).cache
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"states of linattn, which F\.scaled_dot_product_attention cannot continue"):
        model(tokens(), cache=past)


def test_models_without_attention_are_refused():
    model = make(("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": VOCABULARY}))
    with pytest.raises(ValueError, match="has no attention"):
        model.set_attn_implementation("linattn:elu")
    model.config._attn_implementation = "linattn:elu"
    with pytest.raises(ValueError, match="ignores attn_implementation"):
        attended_modules(model, input_ids=tokens())
    with pytest.raises(ValueError, match="is 'sdpa', not one of linattn"):
        attended_modules(make(DECODERS["llama"]), input_ids=tokens())
    with pytest.raises(ValueError, match="the attention of this Linear is None"):
        attended_modules(torch.nn.Linear(2, 2))


REFUSED = {
    "softcap": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}),
    "s_aux": ("GptOssForCausalLM", {**GROUPED, "head_dim": 8, "num_local_experts": 2}),
    "position_bias": (
        "T5EncoderModel",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": VOCABULARY},
    ),
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_of_softmax_are_refused(option):
    model = make(REFUSED[option])
    model.set_attn_implementation("linattn:elu")
    with pytest.raises(ValueError, match=f"passes {option}="):
        model(input_ids=tokens())


@every({**DECODERS, **ENCODERS, **IMAGES, **ENCODER_DECODERS})
def test_a_stock_configuration_trains(family):
    """With the dropout of weights that it has in transformers."""
    model = make(family, torch.float32)
    if family in IMAGES.values():
        inputs = {"pixel_values": torch.randn(2, 3, 12, 12)}
    elif family in ENCODER_DECODERS.values():
        inputs = {"input_ids": tokens()} if family is not ENCODER_DECODERS["whisper"] else source(family)
        inputs = {key: x.float() if x.is_floating_point() else x for key, x in inputs.items()}
        inputs["decoder_input_ids"] = tokens()
    else:
        inputs = {"input_ids": tokens(n=4)}
    replace_attention(model, "elu")
    model.train()(**inputs)[0].square().sum().backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    assert gradients and all(x.isfinite().all() for x in gradients)


def test_dropout_drops_keys_and_keeps_the_mean():
    bert = make(ENCODERS["bert"], torch.float32, hidden_dropout_prob=0.0)
    bert.set_attn_implementation("linattn:elu")
    layer, x = bert.encoder.layer[0].attention.self, torch.randn(1, 7, 32)
    expected, _ = layer(x)
    # each row of a batch draws its own keys
    drawn, _ = layer.train()(x.expand(2000, 7, 32))
    assert (drawn[0] - expected).abs().max() > 1e-3
    spread = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - expected[0]).abs() < 6 * spread + 1e-6).all()


def test_what_cannot_be_expressed_is_refused():
    bert = make(ENCODERS["bert"])
    bert.set_attn_implementation("linattn:elu")
    with pytest.raises(ValueError, match="mask of shape"):
        bert(tokens(), attention_mask=torch.zeros(3, 1, 11, 11).double())
    with pytest.raises(ValueError, match="output_attentions=True: the matrix"):
        bert(tokens(), output_attentions=True)
    swin = make(
        (
            "SwinModel",
            {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4},
        )
    )
    swin.set_attn_implementation("linattn:elu")
    with pytest.raises(ValueError, match="mask of shape"):
        swin(torch.randn(1, 3, 16, 16).double())
    windowed = make(WINDOWED["mistral"])
    for method in ("elu", "local+elu"):
        windowed.set_attn_implementation(f"linattn:{method}")
        windowed(tokens(2, 5))
        with pytest.raises(ValueError, match="cannot forget the tokens before a sliding window of 5"):
            windowed(tokens(2, 6))
    with pytest.raises(ValueError, match="cannot forget"):
        windowed.generate(tokens(2, 4), max_new_tokens=5, do_sample=False)


def test_overlays_of_masks_are_refused():
    from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

    model = make(DECODERS["llama"])
    model.set_attn_implementation("linattn:elu")
    options = {"config": model.config, "inputs_embeds": torch.zeros(1, 6, 32), "cache": None}
    some = torch.tensor([[0, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="overlays a mask function"):
        create_causal_mask(**options, attention_mask=None, or_mask_function=lambda b, h, q, k: q >= 0)
    images = torch.tensor([[-1, 0, 0, -1, -1, -1]])
    with pytest.raises(ValueError, match="some tokens see later ones"):
        create_causal_mask(**options, attention_mask=None, block_sequence_ids=images)
    cached = {**options, "cache": DynamicCache(config=model.config)}
    with pytest.raises(ValueError, match="must cover the 6 tokens"):
        create_causal_mask(**cached, attention_mask=some[:, 1:])
    model.config.attention_chunk_size = 4
    chunks = create_chunked_causal_mask(**options, attention_mask=None)
    assert chunks.tolist() == [[[[0, 0, 0, 0, 1, 1]]]]
    with pytest.raises(ValueError, match="do not go together with padding"):
        create_chunked_causal_mask(**options, attention_mask=some)
    with pytest.raises(ValueError, match="attention in chunks has no state"):
        DynamicCache(config=model.config)


def test_caches_that_hold_keys_are_refused():
    model, ids = make(DECODERS["llama"]), tokens(1, 4).repeat(1, 4)
    model.set_attn_implementation("linattn:elu")
    for options, message in (
        ({"cache_implementation": "static"}, "constant size already"),
        ({"cache_implementation": "quantized"}, "linattn"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            model.generate(ids, max_new_tokens=4, do_sample=False, **options)


def test_names_are_checked():
    model = make(DECODERS["llama"])
    with pytest.raises(ValueError, match="did you mean 'elu'"):
        model.set_attn_implementation("linattn:elux")
    for name in ATTENTIONS:
        if name not in METHODS:
            message = "makes gates" if traits(name).gated else "of its own"
            with pytest.raises(ValueError, match=f"{message}.*, which a name cannot hold"):
                model.set_attn_implementation(f"linattn:elu+{name}")
    with pytest.raises(ValueError, match="causal only"):
        bert = make(ENCODERS["bert"])
        bert.set_attn_implementation("linattn:retention")
        bert(tokens())
    assert register_attention("local:3+elu:1") == "linattn:local:3+elu:1"
    assert "linattn:local:3+elu:1" in transformers.AttentionInterface().valid_keys()


def test_transformers_without_a_hook_is_named(monkeypatch):
    from linattn.integrations.transformers.stock_attention import hooks

    monkeypatch.delattr(transformers.cache_utils, "get_layer_types_and_kwargs")
    with pytest.raises(ImportError, match=f"transformers {transformers.__version__} has no .*get_layer_types"):
        hooks._wrap(transformers.cache_utils, "get_layer_types_and_kwargs", lambda original: original)
