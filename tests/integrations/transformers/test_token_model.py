"""Requests in one batch of a stock model get the tokens that transformers' `generate` gives each alone."""

import pytest
import torch
import transformers
from torch.testing import assert_close

from linattn import Request, generate_each, states
from linattn.integrations.transformers.token_model import PretrainedTokenModel
from tests.integrations.transformers.hybrids.families import FAMILIES, TEXT, make

SIZES = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2}
# one model for each kind of layer of a cache, and of positions
HYBRIDS = ("qwen3_next", "kimi_linear", "mamba2", "falcon_h1", "nemotron_h")
STOCK = {
    "llama": ("LlamaForCausalLM", TEXT),
    "linattn": ("LlamaForCausalLM", {**TEXT, "attn_implementation": "linattn:local+elu"}),
    "sliding": ("MistralForCausalLM", {**TEXT, "sliding_window": 6}),
    "learned positions": ("GPT2LMHeadModel", {"vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    "no position_ids": ("BloomForCausalLM", {"vocab_size": 37, "hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "convolutions": ("Lfm2ForCausalLM", {**TEXT, "layer_types": ["conv", "full_attention", "conv"]}),
    "mamba": ("MambaForCausalLM", SIZES),
}


def stock(name):
    if name in FAMILIES:
        return make(name)
    kind, options = STOCK[name]
    torch.manual_seed(0)
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    return model


@pytest.mark.parametrize("name", [*HYBRIDS, *STOCK])
def test_requests_get_what_each_gets_alone(name):
    """More requests than rows, so that rows of other lengths come and go."""
    model = stock(name)
    prompts = [torch.randint(3, 37, (length,)).tolist() for length in (5, 1, 9, 12)]
    requests = [Request(prompt, max_new_tokens=4 + i) for i, prompt in enumerate(prompts)]
    texts = dict(generate_each(PretrainedTokenModel(model), requests, size=3))
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        options = {"max_new_tokens": 4 + i, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        new = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        assert texts[i] == new[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "mamba2", "sliding"])
def test_nothing_writes_to_a_state(name):
    """transformers' caches write to their tensors."""
    model = PretrainedTokenModel(stock(name))
    with torch.inference_mode():
        _, state = model.extend_hidden(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]))
        first, _ = model.extend_hidden(torch.tensor([[5]]), state)
        model.extend_hidden(torch.tensor([[7]]), state)
        again, _ = model.extend_hidden(torch.tensor([[5]]), state)
        pair, _ = model.extend_hidden(torch.tensor([[5], [7]]), states.repeat(state, 2))
    assert_close(again, first, rtol=0, atol=0)
    assert_close(pair[:1], first)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("minimax", "its cache is a MiniMaxCache"), ("qwen4_exp", "its cache has layers DynamicIndexedLayer")],
)
def test_a_model_whose_rows_cannot_be_joined_is_named(name, reason):
    with pytest.raises(ValueError, match=f"ForCausalLM cannot be joined: {reason}"):
        PretrainedTokenModel(make(name))


def test_models_that_differ_in_their_attention_share_no_file(tmp_path):
    """The weights are the same, and the states have the same shapes."""
    model, text = stock("linattn"), [3, 1, 4, 1, 5]
    states.PrefixCache(PretrainedTokenModel(model), folder=tmp_path).read(text)
    assert states.PrefixCache(PretrainedTokenModel(model), folder=tmp_path).find(text).num_tokens == 5
    model.set_attn_implementation("linattn:local+relu")
    assert states.PrefixCache(PretrainedTokenModel(model), folder=tmp_path).find(text).num_tokens == 0


@pytest.mark.parametrize("name", ["llama", "linattn", "mamba2"])
def test_masked_tokens_are_missing_tokens(name):
    model, tokens = PretrainedTokenModel(stock(name)), torch.tensor([[7, 3, 9, 1], [3, 1, 9, 9], [9, 3, 9, 1]])
    mask = torch.tensor([[False, True, False, True], [True, True, False, False], [False, True, False, True]])
    with torch.no_grad():
        _, state = model.extend_hidden(tokens, key_mask=mask)
        y, _ = model.extend_hidden(torch.tensor([[5], [5], [5]]), state)
        _, alone = model.extend_hidden(torch.tensor([[3, 1]]))
        expected, _ = model.extend_hidden(torch.tensor([[5]]), alone)
    assert_close(y, expected.expand_as(y))


@pytest.mark.parametrize("name", ["llama", "linattn", "mamba2"])
def test_gradients_flow_where_they_are_on(name):
    model = PretrainedTokenModel(stock(name))
    y, _ = model.extend_hidden(torch.tensor([[3, 1, 4]]))
    y.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
