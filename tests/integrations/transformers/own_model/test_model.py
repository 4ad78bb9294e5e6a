import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from linattn.integrations.transformers import LinattnCache, LinattnConfig, LinattnForCausalLM, LinattnModel
from linattn.models import LanguageModel

from .models import SIZE, config, every_model, left_padded, make, prompts


@every_model
def test_a_new_model_is_the_language_model_of_the_same_seed(name):
    torch.manual_seed(3)
    expected = LanguageModel(config(name).to_language_model())
    torch.manual_seed(3)
    model = LinattnForCausalLM(config(name))
    assert_close(model.model.state_dict(), expected.state_dict(), rtol=0, atol=0)


@every_model
def test_the_logits_are_the_language_models(name):
    model, tokens = make(name), prompts()
    assert_close(model(tokens, use_cache=False).logits, model.model(tokens), rtol=0, atol=0)
    assert_close(model(tokens, use_cache=True).logits, model.model(tokens))


@every_model
def test_evaluation_is_deterministic_and_training_has_dropout(name):
    model, tokens = make(name, dropout=0.5), prompts()
    assert_close(model(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    model.train()
    assert not torch.equal(model(tokens).logits, model(tokens).logits)


@every_model
@pytest.mark.parametrize("use_cache", [True, False])
def test_left_padding_changes_nothing(name, use_cache):
    model = make(name)
    rows = [prompts(1, n)[0].tolist() for n in (1, 7, 12)]
    tokens, mask = left_padded(rows)
    together = model(tokens, attention_mask=mask, use_cache=use_cache).logits
    for row, logits in zip(rows, together, strict=True):
        assert_close(logits[-len(row) :], model(torch.tensor([row])).logits[0])


def test_masks_may_be_bool_or_integers_and_have_holes():
    model, tokens = make("local+elu"), prompts(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, [0, 3, 4]] = 0
    present = mask[0].bool()
    expected = model(tokens[:1, present]).logits[0]
    for dtype in (torch.long, torch.int32, torch.uint8, torch.bool):
        assert_close(model(tokens, attention_mask=mask.to(dtype)).logits[0, present], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": prompts()[0]}, r"input_ids must be int64 or int32 \(b, n\), but are torch.int64 \(9,\)"),
        ({"input_ids": [[1, 2]]}, "input_ids must be a tensor, but is a list"),
        ({"inputs_embeds": prompts()}, "inputs_embeds must be floating-point, but is torch.int64"),
        ({"inputs_embeds": torch.randn(9, 32)}, r"inputs_embeds must be \(b, n, 32\), but is \(9, 32\)"),
        ({"inputs_embeds": torch.randn(3, 9, 31)}, r"inputs_embeds must be \(b, n, 32\), but is \(3, 9, 31\)"),
        ({"labels": torch.full((3, 9), 31)}, r"labels must be in \[0, 31\), but go from 31 to 31"),
        ({"labels": prompts(), "logits_to_keep": 2}, "the loss of labels needs the logits after all tokens"),
        ({"labels": prompts(), "logits_to_keep": torch.arange(8, -1, -1)}, "give no logits_to_keep"),
    ],
)
@pytest.mark.parametrize("segment_length", [None, 4])
def test_inputs_and_labels_that_do_not_fit_are_named(unchecked, changes, message, segment_length):
    model, inputs = make("elu"), {"input_ids": prompts()} | changes
    if "inputs_embeds" in changes:
        del inputs["input_ids"]
    model.segment_length = segment_length
    if segment_length is not None and "logits_to_keep" in changes:
        message = "does not work with logits_to_keep"
    with pytest.raises(ValueError, match=message):
        model(**inputs)


@pytest.mark.parametrize("segment_length", [None, 4])
def test_int32_tokens_and_labels_have_the_loss_of_int64(segment_length):
    model, tokens = make("elu"), prompts()
    loss = torch.nn.functional.cross_entropy(model(tokens).logits[:, :-1].mT, tokens[:, 1:])
    model.segment_length = segment_length
    assert_close(model(tokens.int(), labels=tokens.int()).loss.double(), loss, rtol=1e-6, atol=0)


def test_masks_that_cannot_be_honoured_are_refused():
    model, tokens = make("elu"), prompts(2, 8)
    with pytest.raises(ValueError, match=r"must be \(2, 8\) for 8 tokens, but is \(2, 1, 8, 8\)"):
        model(tokens, attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"but is torch\.float32"):
        model(tokens, attention_mask=torch.zeros(2, 8))
    with pytest.raises(ValueError, match="but goes from 1 to 2"):
        model(tokens, attention_mask=torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]] * 2))
    past = model(tokens).cache
    with pytest.raises(ValueError, match=r"must be \(2, 9\) for 1 tokens after 8 in the cache, but is \(2, 1\)"):
        model(tokens[:, :1], cache=past, attention_mask=torch.ones(2, 1, dtype=torch.long))


@pytest.mark.parametrize("argument", ["position_ids", "token_type_ids", "head_mask", "cache_position", "inputs_embed"])
def test_arguments_that_would_be_ignored_are_refused(argument):
    with pytest.raises(TypeError, match=argument):
        make("elu")(prompts(), **{argument: prompts()})


def test_attention_weights_are_refused():
    with pytest.raises(ValueError, match="output_attentions"):
        make("elu")(prompts(), output_attentions=True)
    model = make("elu")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions"):
        model(prompts())


@pytest.mark.parametrize("keep", [1, 4, 0, torch.tensor([0, 5])])
def test_only_the_logits_asked_for_are_made(keep):
    model, tokens = make("elu"), prompts(2, 8)
    expected = model(tokens).logits
    kept = {1: slice(7, 8), 4: slice(4, 8), 0: slice(0, 8)}[keep] if isinstance(keep, int) else keep
    assert_close(model(tokens, logits_to_keep=keep).logits, expected[:, kept])


@pytest.mark.parametrize("use_cache", [True, False])
def test_hidden_states_are_what_each_block_takes_and_the_last_norm_gives(use_cache):
    model, tokens = make("local+elu"), prompts()
    output = model(tokens, output_hidden_states=True, use_cache=use_cache)
    assert len(output.hidden_states) == SIZE["depth"] + 1
    assert_close(output.hidden_states[0], model.model.embed(tokens)[0])
    assert_close(output.hidden_states[1], model.model.blocks[0](output.hidden_states[0]))
    assert_close(model.model.logits(output.hidden_states[-1]), output.logits)
    assert model(tokens).hidden_states is None
    model.config.output_hidden_states = True
    assert_close(model(tokens, use_cache=use_cache).hidden_states, output.hidden_states)


def test_embeddings_may_come_instead_of_tokens():
    model, tokens = make("local+elu"), prompts()
    embeddings = model.get_input_embeddings()(tokens)
    assert_close(model(inputs_embeds=embeddings).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="exactly one"):
        model(tokens, inputs_embeds=embeddings)
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match="learned positions"):
        make("softmax")(inputs_embeds=embeddings)


def test_the_loss_is_the_mean_over_the_tokens_that_follow():
    model, tokens = make("elu", torch.float32), prompts(2, 8)
    labels = tokens.clone()
    labels[0, 5:] = -100
    output = model(tokens, labels=labels)
    each = -output.logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    learned = torch.cat([each[0, :4], each[1]])
    assert_close(output.loss, learned.mean())
    assert_close(model(tokens, labels=labels, num_items_in_batch=100).loss, learned.sum() / 100)
    assert model(tokens).loss is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_missing_token_neither_is_learned_nor_teaches(side):
    model, row = make("local+elu", torch.float32), prompts(1, 6)
    padding, ones = torch.full((1, 3), 7), torch.ones(1, 6, dtype=torch.long)
    parts, masks = ([padding, row], [padding * 0, ones]) if side == "left" else ([row, padding], [ones, padding * 0])
    tokens, mask = torch.cat(parts, 1), torch.cat(masks, 1)
    # labels of padding are usually -100; here they are not
    assert_close(model(tokens, attention_mask=mask, labels=tokens).loss, model(row, labels=row).loss)


def test_a_cache_is_made_when_it_is_wanted():
    model, tokens = make("elu"), prompts()
    assert isinstance(model(tokens).cache, LinattnCache)
    assert model(tokens, use_cache=False).cache is None
    model.config.use_cache = False
    assert model(tokens).cache is None
    assert isinstance(model(tokens, use_cache=True).cache, LinattnCache)
    model.config.use_cache = True
    assert model.train()(tokens).cache is None


def test_a_cache_by_its_old_name_is_read_with_a_warning():
    """As by transformers' own models until 5.40."""
    model, base = make("elu"), LinattnModel(config("elu")).double()
    for each, result in ((model, "logits"), (base, "last_hidden_state")):
        tokens, past = prompts(), LinattnCache()
        with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
            each(tokens[:, :4], past_key_values=past, use_cache=True)
        found, expected = each(tokens[:, 4:], cache=past)[result], each(tokens)[result]
        assert_close(found, expected[:, 4:])


def test_caches_that_cannot_be_used_are_refused():
    model, tokens = make("elu"), prompts()
    with pytest.raises(ValueError, match="must be a LinattnCache, but is a DynamicCache"):
        model(tokens, cache=DynamicCache())
    with pytest.raises(ValueError, match="use_cache is False"):
        model(tokens, cache=LinattnCache(), use_cache=False)


def test_the_output_may_be_a_tuple():
    model, tokens = make("elu", torch.float32), prompts()
    loss, logits = model(tokens, labels=tokens, use_cache=False, return_dict=False)
    assert_close(logits, model(tokens).logits)
    assert_close(loss, model(tokens, labels=tokens).loss)


def test_the_auto_classes_know_the_model():
    assert isinstance(AutoConfig.for_model("linattn", language_model={"vocab_size": 5}), LinattnConfig)
    assert isinstance(AutoModelForCausalLM.from_config(config("elu")), LinattnForCausalLM)


@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2", "linear"])
def test_the_attention_is_not_transformers_to_choose(implementation):
    with pytest.raises(ValueError, match="attn_implementation"):
        AutoModelForCausalLM.from_config(config("elu"), attn_implementation=implementation)
    with pytest.raises(ValueError, match="attn_implementation"):
        make("elu").set_attn_implementation(implementation)


@pytest.mark.parametrize("name", ["elu", "layers"])
def test_the_vocabulary_can_grow_and_shrink(name):
    model, tokens = make(name), prompts()
    before = model(tokens).logits
    model.resize_token_embeddings(40)
    assert model.config.vocab_size == model.model.config.vocab_size == 40
    after = model(tokens).logits
    assert after.shape[-1] == 40
    assert_close(after[..., :31], before)
    model(torch.tensor([[39]]))
    model.resize_token_embeddings(20)
    assert_close(model(tokens.clamp(max=19)).logits.shape, torch.Size([3, 9, 20]))


def test_new_embeddings_are_as_small_as_the_first_ones():
    model = LinattnForCausalLM(config("layers"))
    model.resize_token_embeddings(1031, mean_resizing=False)
    assert 0.018 < model.model.embedding.weight[31:].std() < 0.022
    assert 0.018 < model.model.head.weight[31:].std() < 0.022


def test_a_model_there_is_can_be_wrapped():
    inner = LanguageModel(config("elu").to_language_model())
    state = torch.get_rng_state()
    model = LinattnForCausalLM.of(inner)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.model is inner
    assert model.training
    assert_close(model(prompts()).logits.shape, torch.Size([3, 9, 31]))
    assert not LinattnForCausalLM.of(inner.eval()).training
    with pytest.raises(ValueError, match="must be a LanguageModel, but is a LinattnForCausalLM"):
        LinattnForCausalLM.of(model)
