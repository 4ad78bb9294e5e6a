"""A cache of states by prefix answers as reading from the start does, within its budget."""

import os
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from linattn.generation import Request, generate, generate_each
from linattn.states import PrefixCache, num_bytes, repeat
from linattn.states import file as state_file
from tests.models.causal import VOCABULARY, every_kind, small_model, some_tokens
from tests.processes import run_in_another
from tests.states.test_rows import assert_same

ELU = {"attention": "local+elu"}


def count_read(model):
    lengths = []
    model.embedding.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    return lengths


@every_kind
def test_what_is_in_the_cache_is_not_read_again(options):
    model, text, more = small_model(options), some_tokens(1, 23), some_tokens(1, 3)
    cache, lengths = PrefixCache(model, every=5), count_read(model)
    first = cache.read(text)
    assert sum(lengths) == 23 and len(cache) == 5
    lengths.clear()
    assert_same(cache.read(text), first, rtol=0, atol=0)
    assert not lengths
    # another ending; and going back, which reads from the nearest state
    for other, new in ((torch.cat([text[:, :17], more], 1), 5), (text[:, :19], 4), (text[:, :4], 4)):
        lengths.clear()
        state = cache.read(other)
        assert sum(lengths) == new
        with torch.no_grad():
            assert_close(model.extend(more, state)[0], model.extend(more, model.extend(other)[1])[0])


def test_a_prefix_of_other_tokens_is_not_found():
    model, text = small_model(ELU), some_tokens(1, 20)
    cache = PrefixCache(model, every=5)
    cache.read(text)
    for place in range(20):
        other = text.clone()
        other[0, place] = (other[0, place] + 1) % VOCABULARY
        assert cache.find(other).num_tokens == place // 5 * 5
    assert cache.find([]).num_tokens == 0 and cache.find(text[:, :4]).state is None


def test_the_budget_holds_and_what_is_used_stays():
    model = small_model(ELU)
    size = num_bytes(model.extend(some_tokens(1, 1))[1])
    cache = PrefixCache(model, budget=4 * size + 1, every=10)
    common, texts = some_tokens(1, 20), [some_tokens(1, 4) for _ in range(6)]
    for text in texts:
        cache.read(torch.cat([common, text], 1))
        assert cache.num_bytes == len(cache) * size <= cache.budget
    # what all have in common was used each time; of the rest the last are left
    lengths = [cache.find(torch.cat([common, text], 1)).num_tokens for text in texts]
    assert lengths == [20, 20, 20, 20, 24, 24]
    cache.clear()
    assert len(cache) == cache.num_bytes == 0
    tiny = PrefixCache(model, budget=1)
    assert_same(tiny.read(common), model.extend(common)[1], rtol=1e-9, atol=1e-9)
    assert len(tiny) == 0


def test_states_are_kept_in_fewer_bytes():
    model, text = small_model(ELU).float(), some_tokens(1, 20)
    caches = [PrefixCache(model, dtype=dtype) for dtype in (None, torch.int8)]
    states = [cache.read(text) for cache in caches]
    assert_same(*states, rtol=0, atol=0)
    assert caches[1].num_bytes < 0.7 * caches[0].num_bytes
    assert_same(caches[1].find(text).state, states[0], rtol=0.1, atol=0.1)


def test_generation_goes_on_from_the_cache():
    model, prompt = small_model(ELU), some_tokens(1, 12)[0].tolist()
    cache = PrefixCache(model, every=5)
    for _ in range(2):
        state = cache.read(prompt[:-1])
        assert generate(model, [prompt[-1:]], max_new_tokens=6, state=state) == generate(
            model, [prompt], max_new_tokens=6
        )


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(2, 3).long(), r"\(2, 3\)"),
        ([], "no tokens"),
        ([VOCABULARY], "tokens must"),
        (3, r"\(n\) or \(1, n\) whole numbers, but are 3"),
        ("text", r"\(n\) or \(1, n\) whole numbers, but are 'text'"),
        (None, r"\(n\) or \(1, n\) whole numbers, but are None"),
        ([0.5], r"\(n\) or \(1, n\) whole numbers, but are \[0.5\]"),
    ],
)
def test_wrong_tokens(tokens, message):
    with pytest.raises(ValueError, match=message):
        PrefixCache(small_model(ELU)).read(tokens)


def test_states_that_were_made_elsewhere():
    model, tokens = small_model(ELU), some_tokens(1, 20)
    cache, read = PrefixCache(model, every=8), PrefixCache(model, every=8)
    with torch.no_grad():
        made = {n: model.extend(tokens[:, :n])[1] for n in (8, 16, 20)}
    cache.put(tokens, made)
    assert_same(cache.find(tokens).state, made[20], rtol=0, atol=0)
    read.read(tokens)
    assert (len(cache), cache.num_bytes, list(cache._states)) == (3, read.num_bytes, list(read._states))
    # what is there stays
    cache.put(tokens, {8: made[20]})
    assert_same(cache.find(tokens[:, :8]).state, made[8], rtol=0, atol=0)
    for length in (0, 21):
        with pytest.raises(ValueError, match=f"1 to 20 tokens, as many as there are, but one is of {length}"):
            cache.put(tokens, {length: made[8]})
    for wrong, message in ((made[8].stack, "must be a TokenModelState"), (repeat(made[8], 2), r"one row, but .* of 2")):
        with pytest.raises(ValueError, match=message):
            cache.put(tokens, {9: wrong})
    for wrong, message in (([made[8]], "new must be a Mapping"), ({"8": made[8]}, r"its keys are \['8'\]")):
        with pytest.raises(ValueError, match=message):
            cache.put(tokens, wrong)
    with pytest.raises(ValueError, match="must be a TokenModelState"):
        cache.put(tokens, {8: made[8]}, made[8].stack)
    assert len(cache) == 3


@every_kind
def test_a_folder_serves_after_a_restart(options, tmp_path):
    model, text = small_model(options), some_tokens(1, 12)
    first = PrefixCache(model, every=5, folder=tmp_path).read(text)
    lengths, again = count_read(model), PrefixCache(model, every=5, folder=tmp_path)
    assert_same(again.read(text), first, rtol=0, atol=0)
    assert again.find(text[:, :7]).num_tokens == 5
    assert not lengths and len(again) == 2


def test_a_full_disk_costs_the_files_alone(tmp_path, monkeypatch):
    model, text = small_model(ELU), some_tokens(1, 12)
    expected = generate(model, text, max_new_tokens=6)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_file, "write_tensors", full)
    cache = PrefixCache(model, every=5, folder=tmp_path)
    with pytest.warns(UserWarning, match="in memory alone.*No space left"):
        found = list(generate_each(model, [Request(text[0], max_new_tokens=6)], cache=cache))
    assert found == [(0, expected[0])]
    assert cache.find(text).num_tokens == 11
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_states_in_a_folder_are_of_their_model_only(tmp_path):
    text, model = some_tokens(1, 9), small_model(ELU)
    cache = PrefixCache(model, folder=tmp_path)
    cache.read(text)
    other = small_model(ELU, window=6)
    other.load_state_dict(model.state_dict())
    for cannot in (PrefixCache(other, folder=tmp_path), PrefixCache(model, folder=tmp_path, dtype=torch.bfloat16)):
        assert cannot.find(text).num_tokens == 0
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    cache.clear()
    assert cache.find(text).num_tokens == 0


def test_a_damaged_file_is_read_anew(tmp_path):
    model, text = small_model(ELU), some_tokens(1, 12)
    first = PrefixCache(model, every=5, folder=tmp_path).read(text)
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:-9]), Path.unlink):
        damage(next(tmp_path.glob("*/12-*.state")))
        cache = PrefixCache(model, every=5, folder=tmp_path)
        assert cache.find(text).num_tokens == 10
        assert_same(cache.read(text), first, rtol=1e-9, atol=1e-9)
        assert PrefixCache(model, folder=tmp_path).find(text).num_tokens == 12


def test_the_budget_of_a_folder_holds(tmp_path):
    """Over all models, and with what a killed process left."""
    models, texts = [small_model(ELU) for _ in range(2)], [some_tokens(1, 4) for _ in range(5)]
    PrefixCache(models[0], folder=tmp_path).read(texts[0])
    (file,) = tmp_path.glob("*/*.state")
    (file.parent / ".4-00.state.7.tmp").write_bytes(bytes(100))
    size = file.stat().st_size
    cache = PrefixCache(models[1], budget=1, folder=tmp_path, folder_budget=3 * size + 50)
    for i, text in enumerate(texts):
        cache.read(text)
        assert cache.find(texts[0]).num_tokens == 4, "it is used each time"
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= cache.folder_budget
        assert len(list(tmp_path.glob("*/*"))) == (2, 3, 3, 3, 3)[i] + (i == 0)
    assert [cache.find(text).num_tokens for text in texts] == [4, 0, 0, 4, 4]


def read_and_exit(folder, path, texts):
    PrefixCache(torch.load(path, weights_only=False), every=5, folder=folder, budget=1).read(texts)


def test_processes_share_a_folder(tmp_path):
    """And a kill while one writes leaves the others what was there."""
    model, text = small_model(ELU), some_tokens(1, 12)
    torch.save(model, tmp_path / "model")
    assert run_in_another(read_and_exit, tmp_path / "states", tmp_path / "model", text) == 0
    lengths = count_read(model)
    PrefixCache(model, every=5, folder=tmp_path / "states").read(text)
    assert not lengths


@pytest.mark.parametrize("call", ["replace", "fsync", "open"])
def test_a_write_that_is_broken_off_leaves_no_state(tmp_path, monkeypatch, call):
    model, text = small_model(ELU), some_tokens(1, 12)
    cache = PrefixCache(model, every=5, folder=tmp_path)
    cache.read(text[:, :5])

    def fails(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, call, fails)
        cache.read(text)
    assert PrefixCache(model, folder=tmp_path).find(text).num_tokens == 5
    assert_same(cache.read(text), model.extend(text)[1], rtol=1e-9, atol=1e-9)


def test_what_was_read_before_is_part_of_the_prefix():
    model, text, more = small_model(ELU), some_tokens(1, 12), some_tokens(1, 3)
    cache, pasts = PrefixCache(model, every=5), [None, *(model.extend(some_tokens(1, 4))[1] for _ in range(2))]
    for past in pasts:
        with torch.no_grad():
            expected = model.extend(more, model.extend(text, past)[1])[0]
            assert_close(model.extend(more, cache.read(text, past))[0], expected)
            assert_close(model.extend(more, cache.read(text, past))[0], expected)
    assert len(cache) == 9
