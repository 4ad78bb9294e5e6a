"""Tokens are taken back from the caches of hybrid models that were sped up, so assisted decoding works there, too."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from linattn.integrations.transformers import speed_up
from tests.integrations.transformers.hybrids.families import FAMILIES, SELECTIVE, VOCABULARY, make

# their caches have other states too, or another name or class
REFUSED = {
    "qwen4_exp": "stateful models, such as Qwen4ExpForCausalLM",
    "minimax": "Assisted decoding requires a cache",
    # a text of several tokens does not continue the state of these
    **dict.fromkeys(SELECTIVE, "stateful models, such as "),
}
HEADLESS = ("glm5_next",)
GENERATING = [name for name in FAMILIES if name not in (*REFUSED, *HEADLESS)]
# a model for each scan, with softmax beside it in one layer or in others
KINDS = ("qwen3_next", "kimi_linear", "mamba2", "falcon_h1")
CROPS = {
    "in one call": ((12,), 5),
    "all of a call": ((8, 4), 4),
    "over calls of one token": ((5, 1, 1, 1, 1), 3),
    "over calls and in one": ((5, 6, 1, 1), 4),
    "all": ((3, 2), 5),
    "none": ((4, 5), 0),
}


@pytest.fixture(scope="module")
def sped_up() -> Iterator[Any]:
    """A function that makes a model and speeds it up once for all tests."""
    models: dict[str, Any] = {}
    records = []

    def get(family: str) -> Any:
        if family not in models:
            models[family] = make(family)
            records.append(speed_up(models[family]))
        return models[family]

    yield get
    for record in records:
        record.undo()


def tokens(n: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, n))


def greedy(model: Any, x: torch.Tensor, **drafts: Any) -> list[int]:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(x, **options, **drafts)[0].tolist()


@pytest.mark.parametrize("family", GENERATING)
def test_drafts_change_no_token(sped_up, family):
    """Guesses from a text that repeats itself are right and wrong; those of the model as its assistant are all right,
    and it reads them one by one."""
    model, x = sped_up(family), tokens(6).repeat(1, 3)
    expected = greedy(model, x)
    assert greedy(model, x, prompt_lookup_num_tokens=4) == expected
    assistant = sped_up("qwen3_next") if family == "mamba2" else model
    assert greedy(model, x, assistant_model=assistant) == expected


@pytest.mark.parametrize("family", REFUSED)
def test_models_whose_tokens_cannot_be_taken_back_are_named(sped_up, family):
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[family]):
        greedy(sped_up(family), tokens(8), prompt_lookup_num_tokens=3)


def read(model: Any, cache: DynamicCache, *pieces: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(piece, cache=cache, use_cache=True).logits for piece in pieces], 1)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(("cuts", "count"), CROPS.values(), ids=CROPS)
@torch.no_grad()
def test_cropped_is_never_read(sped_up, family, cuts, count):
    model, x, following = sped_up(family), tokens(sum(cuts)), tokens(4)
    cropped, fresh = (DynamicCache(config=model.config) for _ in range(2))
    cropped.activate_past_recording()
    read(model, cropped, *x.split(cuts, 1))
    cropped.crop(-count)
    kept = x[:, : x.shape[1] - count]
    if kept.shape[1]:
        read(model, fresh, *kept.split(1, 1))
    expected = read(model, fresh, *following.split(1, 1))
    for _ in range(2):
        assert_close(read(model, cropped, following), expected, rtol=0, atol=2e-5)
        cropped.crop(-4)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("count", [2, 5])
@torch.no_grad()
def test_the_past_of_reordered_rows_is_reordered_too(sped_up, family, count):
    """The tokens that are taken back are a part of a call, or all of it."""
    model, order = sped_up(family), torch.tensor([2, 0, 2])
    x, following = torch.randint(3, VOCABULARY, (3, 9)), torch.randint(3, VOCABULARY, (3, 2))
    cropped, fresh = (DynamicCache(config=model.config) for _ in range(2))
    cropped.activate_past_recording()
    read(model, cropped, *x.split((4, 5), 1))
    cropped.reorder_cache(order)
    cropped.crop(-count)
    expected = read(model, fresh, *x[order, : 9 - count].split(1, 1), *following.split(1, 1))[:, -2:]
    assert_close(read(model, cropped, following), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
@torch.no_grad()
def test_what_is_not_recorded_cannot_be_taken_back(sped_up, family):
    model, cache = sped_up(family), DynamicCache(config=sped_up(family).config)
    read(model, cache, tokens(4))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    read(model, cache, tokens(300))
    with pytest.raises(ValueError, match="256 are recorded"):
        cache.crop(-257)
    cache.crop(-256)
    read(model, cache, *tokens(70).split(1, 1))
    with pytest.raises(ValueError, match=r"65 tokens cannot be taken back: .* no more than 64 calls"):
        cache.crop(-65)
    cache.crop(-64)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(1)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("count", [0, 2])
@torch.no_grad()
def test_a_cache_goes_on_after_the_end_of_recording(sped_up, family, count):
    """transformers ends it when it returns a cache to the caller."""
    model, x = sped_up(family), tokens(9)
    cache, fresh = (DynamicCache(config=model.config) for _ in range(2))
    cache.activate_past_recording()
    read(model, cache, x[:, : 5 + count])
    cache.crop(-count)
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False
    expected = read(model, fresh, *x.split(1, 1))
    assert_close(read(model, cache, x[:, 5:7], x[:, 7:]), expected[:, 5:], rtol=0, atol=2e-5)
    with pytest.raises((RuntimeError, ValueError), match="activate_past_recording"):
        cache.crop(-1)


@pytest.mark.parametrize(("family", "name"), [("qwen3_next", "past_key_values"), ("mamba2", "cache_params")])
@torch.no_grad()
def test_a_cache_by_its_old_name_is_recorded(sped_up, family, name):
    """transformers renames it, but after our hook has looked for it."""
    model, x = sped_up(family), tokens(9)
    cache, fresh = (DynamicCache(config=model.config) for _ in range(2))
    cache.activate_past_recording()
    with pytest.warns(FutureWarning, match=f"`{name}` is deprecated"):
        model.base_model(x, **{name: cache}, use_cache=True)
    cache.crop(-3)
    expected = read(model, fresh, x[:, :6], x[:, :2])[:, 6:]
    assert_close(read(model, cache, x[:, :2]), expected, rtol=0, atol=2e-5)


def test_a_copy_takes_drafts_but_a_model_of_states_alone_gives_none(sped_up):
    """Its cache does not know how many tokens it has read, as an assistant's must."""
    model, x = sped_up("mamba2"), tokens(6).repeat(1, 3)
    copied = deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.normal_()
    assert greedy(copied, x, prompt_lookup_num_tokens=4) == greedy(copied, x) != greedy(model, x)
    with pytest.raises(ValueError, match=r"only contain LinearAttention layers"):
        greedy(sped_up("qwen3_next"), x, assistant_model=model)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_undo_lets_transformers_refuse_again(family):
    model = make(family)
    record = speed_up(model)
    assert not model._is_stateful
    record.undo()
    record.undo()
    with pytest.raises(ValueError, match=f"stateful models, such as {type(model).__name__}"):
        greedy(model, tokens(8), prompt_lookup_num_tokens=3)
    assert len(greedy(model, tokens(8))) == 20
