"""The functions for states take transformers' caches that hold ours: a cache goes on as its rows do alone."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from linattn import states
from linattn.integrations.transformers import LinattnCache, LinattnForCausalLM
from linattn.integrations.transformers.stock_attention.hooks import METHODS
from linattn.linearize import convert, plan
from tests.models.causal import MODELS as CAUSAL
from tests.models.causal import small_model

from .stock_attention.families import DECODERS, ENCODER_DECODERS
from .stock_attention.families import make as make_stock


def linearized():
    model = make_stock(DECODERS["llama"])
    convert(model, plan(model, method="local+elu", window=3))
    return model.eval()


def stock(method):
    model = make_stock(DECODERS["llama"])
    model.set_attn_implementation(f"linattn:{method}")
    return model


MODELS = {
    **{
        f"ours {name}": lambda options=options: LinattnForCausalLM.of(small_model(options))
        for name, options in CAUSAL.items()
    },
    **{f"llama {method}": lambda method=method: stock(method) for method in (*METHODS, "local:2+taylor2:2")},
    "linearized": linearized,
}


@pytest.fixture(scope="module", autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


def some_tokens(b, n):
    return torch.randint(1, 13, (b, n))


def read(model, tokens):
    return model(tokens, use_cache=True).cache


def following(model, cache, tokens):
    return model(tokens, cache=cache).logits


def test_rows_of_caches_go_on_as_alone(model):
    """Rows of different lengths are joined as those of a batch with padding on the left."""
    lengths, more = (9, 4, 7), some_tokens(3, 2)
    caches = [read(model, some_tokens(1, n)) for n in lengths]
    expected = [following(model, copy.deepcopy(cache), more[i : i + 1])[0] for i, cache in enumerate(caches)]
    joined = states.concatenate(caches)
    assert type(joined) is type(caches[0])
    assert (states.count_rows(joined), joined.get_seq_length()) == (3, 9)
    starts = torch.tensor(lengths)[:, None]
    inputs = {"attention_mask": (torch.arange(11) >= 9 - starts).long()}
    if not isinstance(model, LinattnForCausalLM):
        inputs["position_ids"] = starts + torch.arange(2)
    order = [2, 0]
    some = {name: x[order] for name, x in inputs.items()}
    found = model(more[order], cache=states.select(joined, order), **some).logits
    assert_close(found, torch.stack([expected[i] for i in order]))
    assert_close(model(more, cache=joined, **inputs).logits, torch.stack(expected))
    forked = states.repeat(states.detach(caches[1]), 2)
    assert_close(following(model, forked, more[1:2].expand(2, -1)), expected[1].expand(2, -1, -1))
    # no function wrote to a cache
    assert [cache.get_seq_length() for cache in caches] == list(lengths)
    assert_close(following(model, caches[0], more[:1])[0], expected[0])


def test_a_saved_cache_is_the_same(model, tmp_path):
    cache, path, more = read(model, some_tokens(2, 9)), tmp_path / "text.state", some_tokens(2, 2)
    states.save_state(cache, path, model=model, num_tokens=9)
    loaded = states.load_state(path, model=model)
    assert type(loaded) is type(cache)
    assert states.describe_state(path).rows == 2
    assert states.num_bytes(loaded) == states.num_bytes(cache)
    expected = following(model, copy.deepcopy(cache), more)
    assert_close(following(model, loaded, more), expected, rtol=0, atol=0)
    small = states.compress(cache, torch.float16)
    assert states.num_bytes(small) < states.num_bytes(cache)
    following(model, states.restore(small), more)


def test_a_cache_of_another_attention_is_refused(tmp_path):
    model, path = stock("elu"), tmp_path / "text.state"
    states.save_state(read(model, some_tokens(1, 5)), path, model=model)
    with pytest.raises(ValueError, match="attn_implementation was 'linattn:elu' there and is 'linattn:favor' here"):
        states.load_state(path, model=stock("favor"))
    with pytest.raises(ValueError, match="a state of a LlamaForCausalLM, but this is"):
        states.load_state(path, model=None)


@pytest.mark.parametrize(
    ("name", "value"), [("rms_norm_eps", 0.5), ("rope_parameters", {"rope_type": "default", "rope_theta": 100.0})]
)
def test_a_cache_of_another_configuration_is_refused(tmp_path, name, value):
    """The weights are the same, and the outputs are not."""
    path, other = tmp_path / "text.state", make_stock(DECODERS["llama"], **{name: value})
    other.set_attn_implementation("linattn:elu")
    model = stock("elu")
    model.load_state_dict(other.state_dict())
    states.save_state(read(model, some_tokens(1, 5)), path, model=model)
    with pytest.raises(ValueError, match=f"a state of another model: {name} was"):
        states.load_state(path, model=other)
    model.config.architectures, model.config.use_cache = ["LlamaForCausalLM"], False
    states.load_state(path, model=model)


def test_our_state_goes_into_a_cache_and_back():
    ours, tokens, more = small_model({"attention": "local+elu"}), some_tokens(1, 9), some_tokens(1, 3)
    model, (_, state) = LinattnForCausalLM.of(ours), ours.extend(tokens)
    cache = LinattnCache(state, num_tokens=9)
    assert_close(following(model, cache, more), ours.extend(more, state)[0])
    assert cache.get_seq_length() == 12
    assert_close(ours.extend(more, cache.state)[0], following(model, cache, more))


def test_other_caches_are_refused():
    model = make_stock(DECODERS["llama"])
    with pytest.raises(ValueError, match="must hold states of linattn, but one is a DynamicLayer"):
        states.select(read(model, some_tokens(1, 5)), [0])
    with pytest.raises(ValueError, match="no token was read"):
        states.count_rows(DynamicCache(config=stock("elu").config))
    bart = make_stock(ENCODER_DECODERS["bart"])
    with pytest.raises(ValueError, match="is two caches"):
        states.count_rows(bart(some_tokens(1, 5), decoder_input_ids=some_tokens(1, 3)).cache)
