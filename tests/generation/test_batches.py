"""A request in a running batch gets the tokens that it would get alone, whoever joins or leaves."""

import random

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from linattn.attention import SoftmaxAttention
from linattn.generation import ContinuousBatch, Request, Sampling, batches, generate, generate_each, rows
from linattn.ops.nested import map_state
from linattn.states import PrefixCache, num_bytes
from tests.models.causal import MODELS, VOCABULARY, every_kind, small_model, some_tokens

ELU = {"attention": "local+elu"}
SAMPLINGS = (
    Sampling(),
    Sampling(repetition_penalty=1.5),
    Sampling(temperature=1.5),
    Sampling(temperature=2.0, top_k=5, repetition_penalty=0.8),
    Sampling(temperature=1.0, filter=lambda logits: logits.flip(-1)),
    Sampling(filter=lambda logits: logits.flip(-1)),
)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """Prompts of a few tokens are read in several pieces, some of them padded, and few rows share a call."""
    monkeypatch.setattr(batches, "PIECE", 16)
    monkeypatch.setattr(batches, "SHORTEST", 2)
    monkeypatch.setattr(batches, "ROWS", 3)


def some_requests(seed, count, **more):
    choose = random.Random(seed)
    for i in range(count):
        prompt = [choose.randrange(VOCABULARY) for _ in range(choose.choice([1, 2, 9]))]
        stops = [choose.randrange(VOCABULARY)] if i % 2 else []
        options = {"sampling": SAMPLINGS[i % len(SAMPLINGS)], "stop_tokens": stops, "seed": i} | more
        yield Request(prompt, max_new_tokens=choose.randrange(1, 8), **options)


def alone(model, request):
    options = {name: getattr(request, name) for name in ("max_new_tokens", "sampling", "stop_tokens", "seed", "state")}
    return generate(model, [request.prompt], **options)[0]


def finish(batch, texts=None):
    """Run a batch to its end. Return the tokens of each request."""
    texts = {} if texts is None else texts
    while batch:
        for number, token, last in batch.step():
            texts.setdefault(number, []).append(token)
            assert last is (number not in unended(batch))
    return texts


def unended(batch):
    return {*batch._waiting, *batch._reading, *(row.request for group in batch._groups for row in group.rows)}


@every_kind
def test_each_gets_what_it_would_get_alone(options):
    """They join when a row is free, and one that is cancelled leaves the others as they are."""
    model = small_model(options)
    requests = [Request([3, 1], max_new_tokens=4, state=model.extend(some_tokens(1, 5))[1]), *some_requests(0, 3)]
    batch, texts = ContinuousBatch(model, size=3), {}
    leaver = batch.add(Request([1, 2, 3], max_new_tokens=50))
    for request in requests:
        batch.add(request)
        for number, token, _ in batch.step():
            texts.setdefault(number, []).append(token)
    batch.cancel(leaver)
    finish(batch, texts)
    assert [texts[i + 1] for i in range(len(requests))] == [alone(model, request) for request in requests]


@pytest.mark.parametrize("name", ["mixture", "softmax"])
def test_requests_join_and_leave_at_random(name):
    model, choose = small_model(MODELS[name]), random.Random(1)
    batch, texts, left = ContinuousBatch(model, size=4), {}, set()
    requests = list(some_requests(6, 12))
    for request in requests:
        number = batch.add(request)
        for _ in range(choose.randrange(5)):
            for each, token, _ in batch.step():
                texts.setdefault(each, []).append(token)
        if choose.random() < 0.3:
            left.add(number)
            batch.cancel(number)
    finish(batch, texts)
    expected, came = [alone(model, request) for request in requests], [texts.get(i, []) for i in range(len(requests))]
    assert all(text == whole[: len(text)] for text, whole in zip(came, expected, strict=True))
    short = {i for i, text in enumerate(came) if len(text) < len(expected[i])}
    assert short and short <= left


def test_one_call_per_token_serves_the_rows_of_a_group():
    model, lengths = small_model(ELU), []
    model.embedding.register_forward_pre_hook(lambda module, inputs: lengths.append(tuple(inputs[0].shape)))
    batch = ContinuousBatch(model, size=4)
    for _ in range(4):
        batch.add(Request([1, 2], max_new_tokens=5))
    lengths.clear()
    assert [len(batch.step()) for _ in range(6)] == [4, 4, 4, 4, 4, 0]
    # the first call reads the prompts but for their last tokens
    assert lengths == [(4, 1)] + [(3, 1), (1, 1)] * 5


def test_a_long_prompt_does_not_stall_the_others():
    model, calls = small_model(ELU), []
    batch = ContinuousBatch(model, size=2)
    batch.add(Request([1, 2], max_new_tokens=50))
    batch.step()
    long = batch.add(Request(some_tokens(1, 100)[0], max_new_tokens=1))
    model.embedding.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].numel()))
    steps = [batch.step() for _ in range(8)]
    assert all(len(step) == 1 for step in steps[:6]) and max(calls) == batches.PIECE
    assert (long, True) in [(token.request, token.last) for step in steps for token in step]


def test_many_prompts_need_no_more_memory_than_a_long_one():
    model, calls = small_model(ELU), []
    requests = [Request([1, 2, 3, i], max_new_tokens=1) for i in range(12)]
    batch = ContinuousBatch(model, size=12)
    for request in requests:
        batch.add(request)
    model.embedding.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].numel()))
    texts = finish(batch)
    assert max(calls) == batches.PIECE
    assert [texts[i] for i in range(12)] == [alone(model, request) for request in requests]


def test_softmax_keeps_no_keys_of_rows_that_left():
    """Many short requests, one after another, beside one that goes on."""
    model = small_model({"attention": "softmax"})
    batch, most = ContinuousBatch(model, size=2), 0
    for _ in range(20):
        batch.add(Request([1, 2, 3], max_new_tokens=5))
    first = [batch.step() for _ in range(4)]
    for _ in range(60):
        batch.step()
        most = max([most, *(num_bytes(group.state.state) for group in batch._groups)])
    _, state = model.extend(some_tokens(2, 8))
    assert first and not batch and 0 < most < 1.5 * num_bytes(state)


def test_counts_and_cancelling():
    batch = ContinuousBatch(small_model(ELU), size=2)
    numbers = [batch.add(Request([1] * 40, max_new_tokens=9)) for _ in range(4)]
    assert numbers == [0, 1, 2, 3] and (len(batch), batch.num_rows, batch.num_waiting) == (4, 0, 4)
    assert batch.step() == [] and (len(batch), batch.num_rows, batch.num_waiting) == (4, 2, 2)
    batch.cancel(1)
    batch.cancel(3)
    assert (len(batch), batch.num_rows, batch.num_waiting) == (2, 1, 1)
    texts = {}
    while len(texts) < 2:
        for number, token, _ in batch.step():
            texts.setdefault(number, []).append(token)
    batch.cancel(0)
    finish(batch, texts)
    assert set(texts) == {0, 2} and len(texts[0]) < len(texts[2]) == 9
    batch.cancel(2)
    assert not batch and batch.step() == [] and not batch._groups
    for number in (4, -1):
        with pytest.raises(ValueError, match=f"4 requests, from 0 on, but {number}"):
            batch.cancel(number)


def test_draws_without_a_seed_come_from_the_default_generator():
    model, sampling = small_model(ELU), Sampling(temperature=2.0)
    torch.manual_seed(3)
    ((_, drawn),) = generate_each(model, [Request([1, 2], max_new_tokens=20, sampling=sampling)])
    torch.manual_seed(3)
    assert drawn == generate(model, [[1, 2]], max_new_tokens=20, sampling=sampling)[0]
    state = torch.get_rng_state()
    list(generate_each(model, [Request([1, 2], max_new_tokens=9, sampling=sampling, seed=1)]))
    assert torch.equal(torch.get_rng_state(), state)


def test_requests_are_taken_when_a_row_is_free():
    model, counts = small_model(ELU), []

    def requests():
        for i, request in enumerate(some_requests(2, 9)):
            counts.append(i)
            yield request

    pairs = generate_each(model, requests(), size=2)
    assert not counts
    first = next(pairs)
    assert len(counts) == 2
    texts = dict([first, *pairs])
    assert [texts[i] for i in range(9)] == [alone(model, request) for request in some_requests(2, 9)]


@pytest.mark.parametrize("name", ["mixture", "softmax", "kda", "learned positions"])
def test_what_prompts_have_in_common_is_read_once(name):
    """Tokens are as without a cache; a prompt that the cache knows, and a conversation, are not read again."""
    model, shared, lengths = small_model(MODELS[name]), some_tokens(1, 21)[0].tolist(), []
    cache = PrefixCache(model, every=8)
    prompts = [[*shared, 1], [*shared, 2, 3], [4], shared]
    requests = [Request(prompt, max_new_tokens=5) for prompt in prompts]
    expected = [alone(model, request) for request in requests]
    assert [row for _, row in sorted(generate_each(model, requests, cache=cache))] == expected
    turn = prompts[1] + expected[1] + [7, 8]
    batch = ContinuousBatch(model, cache=cache)
    batch.add(Request(turn, max_new_tokens=3))
    model.embedding.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    assert finish(batch)[0] == generate(model, [turn], max_new_tokens=3)[0]
    # the last new token and one of the question; then the other one and the first two new ones
    assert lengths[:4] == [2, 1, 1, 1]
    _, state = cache.find(shared)
    parts = []
    map_state(parts.append, state)
    assert not any(part.is_inference() for part in parts)


@pytest.mark.parametrize("name", ["mixture", "softmax"])
def test_what_was_read_after_a_state_is_found_after_it_alone(name):
    model, prompt, lengths = small_model(MODELS[name]), some_tokens(1, 22)[0].tolist(), []
    _, state = model.extend(some_tokens(1, 5))
    batch = ContinuousBatch(model, cache=PrefixCache(model, every=8))
    model.embedding.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    for past, unread in ((state, 21), (state, 0), (None, 21), (None, 0), (state, 0)):
        request = Request(prompt, max_new_tokens=3, state=past)
        expected = alone(model, request)
        lengths.clear()
        number = batch.add(request)
        assert finish(batch)[number] == expected
        assert sum(lengths) == unread + 3


def test_a_model_in_training_goes_on_with_it():
    model = small_model(ELU, dropout=0.5)
    expected = [alone(model, request) for request in some_requests(4, 3)]
    model.train()
    assert [row for _, row in sorted(generate_each(model, some_requests(4, 3)))] == expected
    assert all(module.training for module in model.modules())


def test_a_step_that_fails_changes_nothing_that_is_generated():
    model, broken = small_model(ELU), []

    def fail(logits):
        if broken:
            raise ValueError("a filter that fails")
        return logits

    requests = [
        *some_requests(5, 4),
        Request([1, 2], max_new_tokens=6, sampling=Sampling(temperature=1.0, filter=fail)),
    ]
    requests[-1] = Request([1, 2], max_new_tokens=6, sampling=requests[-1].sampling, seed=1)
    expected, batch = [alone(model, request) for request in requests], ContinuousBatch(model)
    numbers, texts = [batch.add(request) for request in requests], {}
    for number, token, _ in [*batch.step(), *batch.step()]:
        texts.setdefault(number, []).append(token)
    broken.append(True)
    for _ in range(2):
        with pytest.raises(ValueError, match="a filter that fails"):
            batch.step()
    broken.clear()
    finish(batch, texts)
    assert [texts[number] for number in numbers] == expected


@pytest.mark.parametrize("cached", [False, True])
def test_after_an_error_of_the_model_the_texts_are_read_again(cached, monkeypatch):
    """In the middle of its layers, where some states are those before a token and others those after it; or where rows
    join, when some states are moved already."""
    model = small_model(ELU)
    requests = [*some_requests(5, 4), Request([1, 2], max_new_tokens=6, sampling=Sampling(temperature=1.0), seed=1)]
    expected = [alone(model, request) for request in requests]
    batch, texts = ContinuousBatch(model, cache=PrefixCache(model, every=3) if cached else None), {}
    numbers = [batch.add(request) for request in requests]
    for _ in range(3):
        for number, token, _ in batch.step():
            texts.setdefault(number, []).append(token)

    def fail(*_):
        raise RuntimeError("out of memory")

    hook = model.blocks[1].feed_forward.register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.step()
    hook.remove()
    requests += some_requests(6, 2)
    expected += [alone(model, request) for request in requests[-2:]]
    numbers += [batch.add(request) for request in requests[-2:]]
    join = rows.concatenate
    for count in (0, 2):
        calls = iter(range(10))
        monkeypatch.setattr(rows, "concatenate", lambda x, n=count, i=calls: join(x) if next(i) < n else fail())
        with pytest.raises(RuntimeError, match="out of memory"):
            finish(batch, texts)
    monkeypatch.undo()
    finish(batch, texts)
    assert [texts[number] for number in numbers] == expected


@pytest.mark.parametrize("name", ["mixture", "softmax", "kda"])
def test_states_stay_where_they_are_in_memory(name):
    """A step writes them over those before it, unless they grow, and never over the states of a caller or a cache, also
    where a row is alone."""
    model = small_model(MODELS[name])
    _, state = model.extend(some_tokens(1, 5))
    cache, tensors = PrefixCache(model), list[torch.Tensor]()
    map_state(lambda x: tensors.append(x.clone()), (state, cache.read([1, 2, 3])))
    batch, grows = ContinuousBatch(model, cache=cache), any(isinstance(x, SoftmaxAttention) for x in model.modules())
    requests = Request([1], max_new_tokens=4, state=state), Request([1, 2, 3, 4], max_new_tokens=4)
    for together in (requests[:1], requests[1:], requests):
        for each in together:
            batch.add(each)
        places = [list[int](), list[int]()]
        for each in places:
            batch.step()
            map_state(lambda x, each=each: each.append(x.data_ptr()), batch._groups[0].state.state.stack)
        assert places[0] == places[1] or grows
        finish(batch)
    map_state(lambda x: assert_close(x, tensors.pop(0), rtol=0, atol=0), (state, cache.read([1, 2, 3])))


def test_logits_of_nan_name_the_requests():
    """Also where the most likely token is taken. When they are cancelled, the others go on."""
    model = small_model(ELU | {"tie_embeddings": False})
    requests = [each for each in some_requests(6, 5) if 7 not in (*each.prompt, *alone(model, each))]
    expected = [alone(model, request) for request in requests]
    with torch.no_grad():
        model.embedding.weight[7] = torch.nan
    batch, texts = ContinuousBatch(model), {}
    numbers = [batch.add(request) for request in requests]
    broken = [batch.add(Request([1, 7], max_new_tokens=3, sampling=each)) for each in SAMPLINGS[:3]]
    with pytest.raises(batches.LogitsError) as error:
        finish(batch, texts)
    assert len(requests) > 1 and error.value.requests == broken
    for number in broken:
        batch.cancel(number)
    finish(batch, texts)
    assert [texts[number] for number in numbers] == expected


def test_a_tensor_and_an_array_are_prompts():
    model = small_model(ELU)
    expected = generate(model, [1, 2], max_new_tokens=2)
    for prompt in (torch.tensor([1, 2]), np.array([1, 2])):
        assert list(generate_each(model, [Request(prompt, max_new_tokens=2)])) == [(0, expected)]
        assert generate(model, prompt, max_new_tokens=2) == expected


def test_what_is_no_request_does_not_end_the_others():
    requests = [Request([1, 2], max_new_tokens=2), None, Request([3], max_new_tokens=2)]
    with pytest.raises(ValueError, match="request must be a Request, but is a NoneType"):
        list(generate_each(small_model(ELU), requests))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.add(Request([], max_new_tokens=1)), "at least one token"),
        (lambda m: m.add(Request([13], max_new_tokens=1)), r"\[0, 13\), but a prompt has 13"),
        (lambda m: m.add(Request([1], max_new_tokens=1, stop_tokens=[13])), "stop_tokens has 13"),
        (lambda m: m.add(Request([1], max_new_tokens=0)), "max_new_tokens must be a whole number of at least 1"),
        (lambda m: m.add(Request([1], max_new_tokens=1, seed=2**64)), "seed must be"),
        (lambda m: m.add(Request([1], max_new_tokens=1, sampling=3)), "sampling must be a Sampling, but is a int"),
        (lambda m: generate_each(m.model, Request([1], max_new_tokens=1)), "requests must be an Iterable"),
        (lambda m: m.add([1, 2]), "must be a Request, but is a list"),
        (lambda m: m.add(Request([1], max_new_tokens=1, state=(1,))), "TokenModelState"),
        (lambda m: m.add(Request([1], max_new_tokens=1, state=m.model.extend(some_tokens(2, 3))[1])), "2 sequences"),
        (lambda m: m.add(Request([1] * 9, max_new_tokens=5)), "end at 12, but prompt and new tokens need 13"),
        (
            lambda m: m.add(Request([1], max_new_tokens=4, state=m.model.extend(some_tokens(1, 9))[1])),
            "end at 12, but state, prompt and new tokens need 13",
        ),
        (
            lambda m: m.add(
                Request([1], max_new_tokens=1, state=small_model({"attention": "gla"}).extend(some_tokens(1, 3))[1])
            ),
            "state",
        ),
        (lambda m: ContinuousBatch(m.model, size=0), "size"),
        (lambda m: ContinuousBatch(m.model, cache=PrefixCache(small_model(ELU))), "of another one"),
        (lambda m: ContinuousBatch(m.model, cache={}), "cache must be a PrefixCache, but is {}"),
        (lambda m: ContinuousBatch(small_model(ELU, causal=False)).add(Request([1], max_new_tokens=1)), "causal"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_generated_is_refused_before_it_joins(call, message):
    batch = ContinuousBatch(small_model({**MODELS["learned positions"], "max_length": 12}))
    with pytest.raises(ValueError, match=message):
        call(batch)
    assert not batch
