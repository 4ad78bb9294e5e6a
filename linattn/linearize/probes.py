"""Probes of a linearized language model: greedy texts, recall over a distance, and the cost of a token beside the cache
of keys and values."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from linattn.integrations.transformers.state_layer import cache_bytes
from linattn.linearize.calls import attention_function, run
from linattn.nn.modes import evaluating

NEEDLE = 32
"""The number of tokens in a passage that a row begins and ends with. The end of its second half is to be recalled."""
SAMPLES = 2
"""The number of texts that a report shows."""
# with one token at a time, each model's weights would drive the other's out of the processor's cache
TURN, TURNS = 8, 3
"""The number of tokens that a model reads in its turn while `costs` measures the time, and the number of turns."""


class Sample(NamedTuple):
    """The tokens of a `prompt`, and those by which the `teacher` and the `linear` model continue it."""

    prompt: list[int]
    teacher: list[int]
    linear: list[int]


class Generated(NamedTuple):
    """The agreement of greedy texts of `tokens` tokens with the teacher's: the share of equal tokens, place by place,
    and the mean number of tokens before the first difference, `equal`. `samples` are the first of these texts."""

    agreement: float
    equal: float
    tokens: int
    samples: tuple[Sample, ...]


@torch.no_grad()
def greedy_agreement(model: PreTrainedModel, teacher: PreTrainedModel, prompts: Tensor, *, tokens: int) -> Generated:
    """Continue the prompts (rows, n) greedily by so many `tokens` with both models. Return how far their texts agree,
    and some of these texts."""
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    # a checkpoint may have other settings of its own
    options |= {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
    texts = []
    for each in (model, teacher):
        with evaluating(each):
            generate: Any = each.generate
            texts.append(generate(prompts.to(each.device), **options)[:, prompts.shape[1] :])
    linear, expected = texts
    same = linear == expected
    samples = zip(*(part[:SAMPLES].tolist() for part in (prompts, expected, linear)), strict=True)
    equal = float(same.cumprod(1).sum(1).double().mean())
    return Generated(float(same.double().mean()), equal, tokens, tuple(Sample(*texts) for texts in samples))


def needles(text: Tensor, length: int, *, rows: int, known: bool) -> Tensor:
    """Return rows of `length` tokens from a long text. Each ends with a passage from elsewhere in the text; if `known`,
    it begins with this passage, too."""
    check_needles(text, length)
    random, samples = torch.Generator().manual_seed(0), []
    for _ in range(rows):
        start, other = (int(torch.randint(len(text) - n + 1, (), generator=random)) for n in (length, NEEDLE))
        row, passage = text[start : start + length].clone(), text[other : other + NEEDLE]
        row[-NEEDLE:] = passage
        if known:
            row[:NEEDLE] = passage
        samples.append(row)
    return torch.stack(samples)


def check_needles(text: Tensor, length: int) -> None:
    """Raise ValueError unless rows of this `length` can be made from the text."""
    if length < 2 * NEEDLE or len(text) < length + NEEDLE:
        raise ValueError(
            f"a row must have at least {2 * NEEDLE} tokens and fit into the text with a passage of {NEEDLE}, but has "
            f"{length} and the text {len(text)}"
        )


@torch.no_grad()
def recall(model: PreTrainedModel, rows: Tensor) -> float:
    """Return the share of correct predictions, given the true tokens before, of the tokens in the second half of the
    passage that ends each of the `rows` of `needles`."""
    half = NEEDLE // 2
    with evaluating(model):
        logits = (run(model, {"input_ids": row[None]}).logits[0, -half - 1 : -1] for row in rows)
        hits = [best.argmax(-1) == row[-half:].to(best.device) for best, row in zip(logits, rows, strict=True)]
    return float(torch.stack(hits).double().mean())


class Cost(NamedTuple):
    """The cost of a token after `tokens` others: the median of its `seconds`, and the `bytes` of the cache then."""

    tokens: int
    seconds: float
    bytes: int


@torch.no_grad()
def costs(
    models: Sequence[PreTrainedModel],
    tokens: int,
    *,
    rows: int = 1,
    repeats: int = TURNS,
    piece: int = 512,
    compiled: bool = False,
) -> list[Cost]:
    """Read `rows` sequences of `tokens` random tokens with each model, `piece` tokens at a time. Then time single
    tokens: 8 with each model in turn, `repeats` times. If `compiled`, torch.compile runs the models; the first few
    tokens then include the time of compilation."""
    vocabulary = min(model.config.get_text_config().vocab_size for model in models)
    ids = torch.randint(vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0)).to(models[0].device)
    caches, seconds = [DynamicCache(config=model.config) for model in models], [[] for _ in models]
    with ExitStack() as stack:
        # not at each step: compiled code checks a module again after an attribute was set
        for model in models:
            stack.enter_context(evaluating(model))
        for model, cache in zip(models, caches, strict=True):
            for part in ids.split(piece, 1):
                _step(model, part, cache)
        # before the tokens that are timed
        sizes = [cache_bytes(cache) for cache in caches]
        steps = [torch.compile(model) if compiled else model for model in models]
        for _ in range(repeats):
            for step, cache, times in zip(steps, caches, seconds, strict=True):
                times += [_step(step, ids[:, -1:], cache) for _ in range(TURN)]
    return [Cost(tokens, statistics.median(times), size) for times, size in zip(seconds, sizes, strict=True)]


def _step(model: Callable[..., Any], ids: Tensor, cache: Cache) -> float:
    """Run the model on the tokens `ids` after those in the `cache`, and return the seconds; on a CPU the process's own
    time, which other programs do not change."""
    clock = time.perf_counter if ids.is_cuda else time.process_time
    started = clock()
    model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return clock() - started


def fused_softmax(teacher: PreTrainedModel) -> AbstractContextManager[None]:
    """Make a teacher attend by torch's fused softmax, with transformers' own cache, inside the block."""
    return attention_function(teacher, "sdpa" if teacher._supports_sdpa else "eager")
