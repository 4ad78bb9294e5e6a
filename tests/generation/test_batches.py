"""A request in a running batch gets the tokens that it would get alone, whoever joins or leaves."""

import random

import pytest
import torch

from linattn.generation import ContinuousBatch, NewToken, Request, Sampling, batches, generate, generate_each
from linattn.nn import LearnedPositions
from linattn.ops.nested import map_state
from linattn.states import PrefixCache, num_bytes
from tests.models.causal import MODELS, VOCABULARY, every_model, small_model, some_tokens

ELU = {"attention": "local+elu"}
SAMPLINGS = (
    Sampling(),
    Sampling(repetition_penalty=1.5),
    Sampling(temperature=1.5),
    Sampling(temperature=2.0, top_k=5, repetition_penalty=0.8),
    Sampling(temperature=1.0, filter=lambda logits: logits.flip(-1)),
)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """Prompts of a few tokens are read in several pieces, some of them padded."""
    monkeypatch.setattr(batches, "PIECE", 16)
    monkeypatch.setattr(batches, "SHORTEST", 3)


def some_requests(seed, count, **more):
    choose = random.Random(seed)
    for i in range(count):
        prompt = [choose.randrange(VOCABULARY) for _ in range(choose.choice([1, 2, 9, 14]))]
        stops = [choose.randrange(VOCABULARY)] if i % 2 else []
        options = {"sampling": SAMPLINGS[i % len(SAMPLINGS)], "stop_tokens": stops, "seed": i} | more
        yield Request(prompt, max_new_tokens=choose.randrange(1, 9), **options)


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
    return {*batch._waiting, *batch._reading, *batch._running}


@every_model
def test_each_gets_what_it_would_get_alone(options):
    """They join when a row is free, and one that is cancelled leaves the others as they are."""
    model, requests = small_model(options), list(some_requests(0, 7))
    requests.insert(4, Request([3, 1], max_new_tokens=6, state=model.extend(some_tokens(1, 5))[1]))
    expected = [alone(model, request) for request in requests]
    batch, texts, choose = ContinuousBatch(model, size=3), {}, random.Random(1)
    leaver = batch.add(Request([1, 2, 3], max_new_tokens=50))
    for request in requests:
        batch.add(request)
        for _ in range(choose.randrange(4)):
            for number, token, _ in batch.step():
                texts.setdefault(number, []).append(token)
    batch.cancel(leaver)
    finish(batch, texts)
    assert [texts[i + 1] for i in range(len(requests))] == expected
