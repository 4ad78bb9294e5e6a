"""Probes of a linearized language model on its own: the text that it generates, what it recalls from far back, and the
cost of a token beside the cache of keys and values."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from linattn.integrations.transformers.linearize.observe import attending_by, evaluating, run
from linattn.ops.nested import num_bytes

NEEDLE = 32
"""Tokens of a passage that comes twice, whose second half must be recalled the second time."""
# a model that had only one token per turn would find its weights driven out of the processor's cache by the other's
TURN = 8


class Generated(NamedTuple):
    """The agreement of greedy texts with the teacher's: the share of equal tokens, place by place, and the mean number
    of tokens before the first that differs, of `tokens`."""

    agreement: float
    equal: float
    tokens: int


def generated(model: PreTrainedModel, teacher: PreTrainedModel, prompts: Tensor, *, tokens: int) -> Generated:
    """Continue the prompts (rows, n) greedily with both models."""
    texts = []
    for each in (model, teacher):
        with evaluating(each):
            generate: Any = each.generate
            text = generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        texts.append(text[:, prompts.shape[1] :])
    same = texts[0] == texts[1]
    return Generated(float(same.double().mean()), float(same.cumprod(1).sum(1).double().mean()), tokens)


def needles(text: Tensor, length: int, *, rows: int, known: bool) -> Tensor:
    """Return rows of `length` tokens from a long text. A passage from elsewhere in it ends each row; with `known`, it
    begins the row, too."""
    random = torch.Generator().manual_seed(0)
    if length < 2 * NEEDLE or len(text) < length + NEEDLE:
        raise ValueError(
            f"a row must have at least {2 * NEEDLE} tokens and fit into the text with a passage of {NEEDLE}, but has "
            f"{length} and the text {len(text)}"
        )
    made = []
    for _ in range(rows):
        start, other = (int(torch.randint(len(text) - n + 1, (), generator=random)) for n in (length, NEEDLE))
        row, passage = text[start : start + length].clone(), text[other : other + NEEDLE]
        row[-NEEDLE:] = passage
        if known:
            row[:NEEDLE] = passage
        made.append(row)
    return torch.stack(made)


def recalled(model: PreTrainedModel, rows: Tensor) -> float:
    """Return the share of the last half passage of each row that the model predicts, given the true tokens before."""
    half = NEEDLE // 2
    with evaluating(model):
        found = [
            run(model, {"input_ids": row[None]}).logits[0, -half - 1 : -1].argmax(-1) == row[-half:] for row in rows
        ]
    return float(torch.stack(found).double().mean())


class Cost(NamedTuple):
    """A token after `tokens` others: the median seconds that it takes, and the bytes of the cache then."""

    tokens: int
    seconds: float
    bytes: int


def costs(
    models: Sequence[PreTrainedModel],
    tokens: int,
    *,
    rows: int = 1,
    repeats: int = 3,
    piece: int = 512,
    compiled: bool = False,
) -> list[Cost]:
    """Read `rows` sequences of `tokens` random tokens with each model, in pieces, and time single tokens after them,
    in `repeats` turns of a few; if `compiled`, by `torch.compile`, whose own time is that of the first few."""
    random, vocabulary = torch.Generator().manual_seed(0), min(model.config.vocab_size for model in models)
    ids = torch.randint(vocabulary, (rows, tokens), generator=random).to(models[0].device)
    caches, seconds = [DynamicCache(config=model.config) for model in models], [[] for _ in models]
    with ExitStack() as stack:
        # not at each step: compiled code checks a module again that was written to
        for model in models:
            stack.enter_context(evaluating(model))
        for model, cache in zip(models, caches, strict=True):
            for part in ids.split(piece, 1):
                _step(model, part, cache)
        # of the cache after `tokens` tokens, not of those that are timed
        sizes = [cache_bytes(cache) for cache in caches]
        steps = [torch.compile(model) if compiled else model for model in models]
        for _ in range(repeats):
            for step, cache, times in zip(steps, caches, seconds, strict=True):
                times += [_step(step, ids[:, -1:], cache) for _ in range(TURN)]
    return [Cost(tokens, statistics.median(times), size) for times, size in zip(seconds, sizes, strict=True)]


def _step(model: Callable[..., Any], ids: Tensor, cache: Cache) -> float:
    """Return the seconds that the tokens take; on a CPU those of the processor, which other programs do not change."""
    clock = time.perf_counter if ids.is_cuda else time.process_time
    started = clock()
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return clock() - started


def cache_bytes(cache: Cache) -> int:
    """Return the bytes of all tensors that a cache's layers hold."""
    return num_bytes(tuple(tuple(vars(layer).values()) for layer in cache.layers))


def native(teacher: PreTrainedModel) -> AbstractContextManager[None]:
    """Let a teacher attend by torch's fused softmax, with transformers' own cache."""
    return attending_by(teacher, "sdpa" if teacher._supports_sdpa else "eager")
