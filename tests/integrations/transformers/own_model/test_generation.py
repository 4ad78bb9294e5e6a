import copy

import pytest
import torch
from transformers import TextStreamer

from linattn.generation import Sampling, generate
from linattn.integrations.transformers import LinattnCache, LinattnForCausalLM
from tests.models.causal import every_kind, small_model

from .models import every_model, left_padded, make, prompts

GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
ROWS = [[3, 14, 15, 9, 2, 6], [5], [27, 18, 28, 18]]


def together(model, rows, **options):
    """The new tokens of rows in one left-padded batch."""
    tokens, mask = left_padded(rows)
    return model.generate(tokens, attention_mask=mask, **options)[:, tokens.shape[1] :].tolist()


@every_model
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_is_our_generate(name, use_cache):
    model = make(name)
    ours = generate(model.model, ROWS, max_new_tokens=12)
    assert together(model, ROWS, **GREEDY, use_cache=use_cache) == ours
    assert len(set(map(tuple, ours))) == 3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1.0, top_k=7, top_p=0.9, repetition_penalty=1.5),
        Sampling(repetition_penalty=2.0),
    ],
)
@pytest.mark.parametrize("name", ["local+elu", "favor"])
def test_the_same_seed_draws_the_same_tokens(name, sampling):
    model = make(name)
    ours = generate(model.model, ROWS, max_new_tokens=12, sampling=sampling, seed=5)
    options = {
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature or None,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p or 1.0,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": 12,
        # a penalty counts the padding among the tokens before: a row's own first token adds none
        "pad_token_id": 0,
    }
    torch.manual_seed(5)
    if sampling.repetition_penalty == 1:
        assert together(model, ROWS, **options) == ours
    else:
        row = torch.tensor([ROWS[0]])
        single = generate(model.model, row, max_new_tokens=12, sampling=sampling, seed=5)
        assert model.generate(row, **options)[:, 6:].tolist() == single


@pytest.mark.parametrize("name", ["local+elu", "softmax"])
def test_stop_tokens_stop(name):
    model = make(name)
    stop = generate(model.model, ROWS, max_new_tokens=12)[0][4]
    ours = generate(model.model, ROWS, max_new_tokens=12, stop_tokens=[stop])
    theirs = together(model, ROWS, **GREEDY, eos_token_id=stop)
    for mine, row in zip(ours, theirs, strict=True):
        assert row[: len(mine)] == mine
        assert not any(row[len(mine) :])
    assert len(ours[0]) <= 5


@torch.no_grad()
def beams_by_definition(model, row: list[int], num_beams: int, steps: int) -> list[int]:
    beams = [(0.0, row)]
    for _ in range(steps):
        scores = model(torch.tensor([beam for _, beam in beams]), use_cache=False).logits[:, -1].float().log_softmax(-1)
        options = [
            (score + float(new), [*beam, token])
            for (score, beam), news in zip(beams, scores, strict=True)
            for token, new in enumerate(news)
        ]
        beams = sorted(options, reverse=True)[:num_beams]
    return beams[0][1][len(row) :]


@every_model
def test_beams_are_those_of_the_definition(name):
    model = make(name)
    found = together(model, ROWS, num_beams=4, do_sample=False, max_new_tokens=8, pad_token_id=0)
    assert found == [beams_by_definition(model, row, 4, 8) for row in ROWS]


def test_beams_find_more_than_greedy_does():
    # otherwise the test above would hold for a cache that no beam ever reorders
    model = make("local+elu")
    assert together(model, ROWS, **GREEDY) != together(model, ROWS, **GREEDY, num_beams=4)


@every_model
def test_beams_do_not_need_the_cache(name):
    model = make(name)
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "eos_token_id": 4}
    assert together(model, ROWS, **options) == together(model, ROWS, **options, use_cache=False)


@every_model
def test_the_length_of_the_prompt_in_pieces_changes_nothing(name):
    model, tokens = make(name), prompts(2, 30)
    expected = model.generate(tokens, **GREEDY)
    assert model.generate(tokens, **GREEDY, prefill_chunk_size=7).tolist() == expected.tolist()


@every_model
def test_generation_goes_on_from_a_cache(name):
    model = make(name)
    tokens, mask = left_padded(ROWS)
    expected = model.generate(tokens, attention_mask=mask, **GREEDY)
    options = {**GREEDY, "max_new_tokens": 5, "return_dict_in_generate": True}
    first = model.generate(tokens, attention_mask=mask, **options)
    # the last token is not in the cache yet
    assert first.cache.get_seq_length() == tokens.shape[1] + 4
    mask = torch.cat([mask, torch.ones(3, 5, dtype=torch.long)], 1)
    options = {**GREEDY, "max_new_tokens": 7}
    rest = model.generate(first.sequences, attention_mask=mask, cache=first.cache, **options)
    assert rest.tolist() == expected.tolist()


def test_a_prompt_can_be_read_once_for_many_continuations():
    model, prefix = make("local+elu"), prompts(1, 20)
    with torch.no_grad():
        cache = model(prefix).cache
    for _ in range(3):
        tokens = torch.cat([prefix, prompts(1, 3)], 1)
        found = model.generate(tokens, cache=copy.deepcopy(cache), **GREEDY)
        assert found.tolist() == model.generate(tokens, **GREEDY).tolist()


def test_generation_starts_from_embeddings():
    model, tokens = make("local+elu"), prompts()
    embeddings = model.get_input_embeddings()(tokens)
    expected = model.generate(tokens, **GREEDY)[:, 9:]
    assert model.generate(inputs_embeds=embeddings, **GREEDY).tolist() == expected.tolist()


def test_scores_and_hidden_states_come_with_the_tokens():
    model, tokens = make("elu"), prompts(1)
    output = model.generate(
        tokens, **GREEDY, return_dict_in_generate=True, output_scores=True, output_hidden_states=True
    )
    assert len(output.scores) == len(output.hidden_states) == 12
    assert isinstance(output.cache, LinattnCache)
    assert output.hidden_states[0][-1].shape == (1, 9, 32)
    assert output.hidden_states[1][-1].shape == (1, 1, 32)


def test_text_streams(capsys):
    class Decoder:
        def decode(self, tokens, **_):
            return " ".join(str(token) for token in torch.as_tensor(tokens).reshape(-1).tolist()) + "\n"

    model, tokens = make("elu"), prompts(1)
    found = model.generate(tokens, **GREEDY, streamer=TextStreamer(Decoder(), skip_prompt=True))
    assert capsys.readouterr().out.split() == [str(token) for token in found[0, 9:].tolist()]


DRAFTS = {
    "prompt lookup": lambda model: {"prompt_lookup_num_tokens": 4},
    "another model": lambda model: {"assistant_model": make("elu")},
    "the model": lambda model: {"assistant_model": model},
}


@pytest.mark.parametrize("draft", DRAFTS)
@every_model
def test_drafts_change_no_token(name, draft):
    model, tokens = make(name), prompts(1, 7).repeat(1, 3)
    expected = model.generate(tokens, **GREEDY)
    assert model.generate(tokens, **GREEDY, **DRAFTS[draft](model)).tolist() == expected.tolist()


# a cache gives tokens back by their states, whatever the features
@every_kind
def test_prompt_lookup_changes_no_token_of_any_state(options):
    model = LinattnForCausalLM.of(small_model(options))
    tokens = torch.randint(1, 13, (1, 5)).repeat(1, 3)
    expected = model.generate(tokens, **GREEDY)
    assert model.generate(tokens, **GREEDY, prompt_lookup_num_tokens=3).tolist() == expected.tolist()


def test_what_needs_keys_and_values_is_refused():
    model, tokens = make("elu"), prompts(1)
    for implementation in ("static", "offloaded", "quantized"):
        with pytest.raises(ValueError, match="cache_implementation"):
            model.generate(tokens, **GREEDY, cache_implementation=implementation)
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([[1, 2, 3]])
    with pytest.raises(TypeError, match="position_ids"):
        model.generate(tokens, **GREEDY, position_ids=torch.arange(9).unsqueeze(0))
    with pytest.raises(ValueError, match="output_attentions"):
        model.generate(tokens, **GREEDY, return_dict_in_generate=True, output_attentions=True)
