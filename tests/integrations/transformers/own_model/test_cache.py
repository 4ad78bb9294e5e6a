import copy

import pytest
import torch
from torch.testing import assert_close

from linattn import states
from linattn.integrations.transformers import LinattnCache
from linattn.ops.nested import map_state

from .models import every_model, left_padded, make, prompts


def filled(model, tokens, mask=None):
    return model(tokens, attention_mask=mask, use_cache=True).cache


def size(cache: LinattnCache) -> int:
    sizes = []
    map_state(lambda tensor: sizes.append(tensor.numel()) or tensor, cache.state)
    return sum(sizes)


@every_model
@pytest.mark.parametrize("cuts", [(1,) * 12, (5, 1, 6), (11, 1)])
def test_pieces_make_the_whole(name, cuts):
    model, tokens = make(name), prompts(2, 12)
    cache, logits, seen = LinattnCache(), [], 0
    for piece in tokens.split(cuts, dim=1):
        logits.append(model(piece, cache=cache).logits)
        seen += piece.shape[1]
        assert cache.get_seq_length() == seen
        assert cache.get_mask_sizes(3, 0) == (seen + 3, 0)
    assert_close(torch.cat(logits, 1), model(tokens, use_cache=False).logits)


@every_model
def test_pieces_of_padded_rows_make_the_whole(name):
    model = make(name)
    rows = [prompts(1, n)[0].tolist() for n in (2, 9, 12)]
    tokens, mask = left_padded(rows)
    cache, logits = LinattnCache(), []
    for start, stop in ((0, 4), (4, 11), (11, 12)):
        piece = model(tokens[:, start:stop], cache=cache, attention_mask=mask[:, :stop])
        logits.append(piece.logits)
    for row, found in zip(rows, torch.cat(logits, 1), strict=True):
        assert_close(found[-len(row) :], model(torch.tensor([row])).logits[0])


@pytest.mark.parametrize("name", ["elu", "favor", "retention", "layers"])
def test_the_size_does_not_depend_on_the_tokens_seen(name):
    model = make(name)
    assert size(filled(model, prompts(2, 20))) == size(filled(model, prompts(2, 60)))


@every_model
def test_rows_can_be_chosen_and_repeated(name):
    model, following = make(name), prompts(6, 2)
    tokens, mask = left_padded([prompts(1, n)[0].tolist() for n in (3, 9, 6)])
    rows, repeats = torch.tensor([2, 0, 0]), torch.arange(3).repeat_interleave(2)
    reordered, selected, repeated = (filled(model, tokens, mask) for _ in range(3))
    reordered.reorder_cache(rows)
    selected.batch_select_indices(rows)
    repeated.batch_repeat_interleave(2)
    for cache, chosen in ((reordered, rows), (selected, rows), (repeated, repeats)):
        new = following[: len(chosen)]
        whole = torch.cat([mask[chosen], torch.ones_like(new)], 1)
        expected = model(torch.cat([tokens[chosen], new], 1), attention_mask=whole).logits[:, -2:]
        assert_close(model(new, cache=cache).logits, expected)


@every_model
def test_a_copy_goes_its_own_way(name):
    model, tokens, following = make(name), prompts(2, 9), prompts(2, 3)
    with torch.no_grad():
        cache = filled(model, tokens)
    other = copy.deepcopy(cache)
    first = model(following, cache=cache).logits
    assert_close(model(following, cache=other).logits, first, rtol=0, atol=0)


@every_model
def test_an_emptied_cache_is_a_new_one(name):
    model, tokens = make(name), prompts(2, 9)
    cache = filled(model, prompts(3, 5))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(model(tokens, cache=cache).logits, model(tokens, use_cache=True).logits, rtol=0, atol=0)


def test_what_a_state_cannot_do_is_refused():
    cache = filled(make("elu"), prompts(2, 9))
    assert cache.is_croppable
    assert not cache.is_compileable
    assert cache.get_max_length() == -1
    cache.crop(0)
    assert cache.get_seq_length() == 9
    with pytest.raises(ValueError, match=r"last 1 tokens cannot be taken back .* 0 are recorded"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(1)
    with pytest.raises(NotImplementedError, match="not keys and values"):
        cache.update(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), 0)
    with pytest.raises(NotImplementedError, match="constant size"):
        cache.offload(0)
    with pytest.raises(NotImplementedError, match="constant size"):
        cache.layers[0].prefetch()


CROPS = {
    "in one call": ((12,), 5),
    "all of a call": ((8, 4), 4),
    "over calls of one token": ((5, 1, 1, 1, 1, 1), 3),
    "all": ((3, 2), 5),
    "none": ((4, 5), 0),
}


@every_model
@pytest.mark.parametrize(("cuts", "count"), CROPS.values(), ids=CROPS)
def test_cropped_is_never_read(name, cuts, count):
    """Rows with missing tokens too: these count as tokens of the cache."""
    model, following = make(name), prompts(3, 4)
    n = sum(cuts)
    tokens, mask = left_padded([prompts(1, i)[0].tolist() for i in (n, n - 1, 2)])
    cache, seen = LinattnCache(), 0
    cache.activate_past_recording()
    with torch.no_grad():
        for cut in cuts:
            seen += cut
            model(tokens[:, seen - cut : seen], cache=cache, attention_mask=mask[:, :seen])
        cache.crop(-count)
        assert cache.get_seq_length() == n - count
        rest = torch.cat([tokens[:, : n - count], following], 1)
        mask = torch.cat([mask[:, : n - count], torch.ones_like(following)], 1)
        for _ in range(2):
            found = model(following, cache=cache, attention_mask=mask).logits
            assert_close(found, model(rest, attention_mask=mask, use_cache=False).logits[:, -4:])
            cache.crop(-4)


def test_tokens_after_the_end_of_recording_cannot_be_taken_back():
    """transformers ends it when it returns a cache to the caller."""
    model, tokens = make("local+elu"), prompts(2, 9)
    cache = LinattnCache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(tokens[:, :6], cache=cache)
        (layer,) = cache.layers
        layer.record_past = False
        model(tokens[:, 6:8], cache=cache)
        with pytest.raises(ValueError, match=r"last 1 tokens cannot be taken back .* 0 are recorded"):
            cache.crop(-1)
        found = model(tokens[:, 8:], cache=cache).logits
        assert_close(found, model(tokens, use_cache=False).logits[:, -1:])


@pytest.mark.parametrize("name", ["elu", "local+elu", "gated_delta"])
def test_only_the_end_of_a_long_text_is_recorded(name):
    model, tokens = make(name), prompts(1, 700)
    sizes = []
    with torch.no_grad():
        for n in (300, 700):
            cache = LinattnCache()
            cache.activate_past_recording()
            logits = model(tokens[:, :n], cache=cache).logits
            (history,) = cache.layers[0].histories
            sizes.append(states.num_bytes(tuple((span.before, span.inputs) for span in history.spans)))
            with pytest.raises(ValueError, match=r"256 are recorded.*keep a copy of the cache"):
                cache.crop(-257)
            cache.crop(-256)
            again = model(tokens[:, n - 256 : n], cache=cache).logits
            assert_close(again, logits[:, -256:])
    assert sizes[0] == sizes[1]


@torch.no_grad()
def test_a_recording_cache_stays_small():
    model, cache = make("elu"), LinattnCache()
    cache.activate_past_recording()
    for piece in prompts(1, 620).split(31, 1):
        model(piece, cache=cache)
        (history,) = cache.layers[0].histories
        assert len(history.spans) <= 2
        assert sum(span.inputs[0].shape[1] for span in history.spans) <= 2 * 256
    cache.crop(-300)
    assert cache.get_seq_length() == 320
    tokens, other = prompts(1, 3), copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([0, 0]))
    cache.crop(-20)
    other.crop(-20)
    expected = model(tokens, cache=other).logits.expand(2, -1, -1)
    assert_close(model(tokens.expand(2, -1), cache=cache).logits, expected)


@torch.no_grad()
def test_generate_goes_on_after_the_tokens_of_a_state():
    model, tokens = make("elu"), prompts(1, 9)
    state, options = model.model.extend(tokens[:, :6])[1], {"max_new_tokens": 6, "do_sample": False}
    found = model.generate(tokens, cache=LinattnCache(state, num_tokens=6), **options)
    assert torch.equal(found, model.generate(tokens, **options))
    with pytest.raises(ValueError, match="num_tokens must be a whole number of at least 0, but is -6"):
        LinattnCache(state, num_tokens=-6)
    with pytest.raises(ValueError, match="num_tokens is 6, but there is no state"):
        LinattnCache(num_tokens=6)


def test_gradients_flow_through_the_state():
    model, tokens = make("local+elu"), prompts(2, 8)
    model(tokens, use_cache=False).logits[:, 4:].square().sum().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    cache = filled(model, tokens[:, :4])
    model(tokens[:, 4:], cache=cache).logits.square().sum().backward()
    assert_close({name: weight.grad for name, weight in model.named_parameters()}, expected)
