"""Generation with a language model, for prompts of any lengths in one batch, in constant memory per token."""

import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.attention.base import InnerAttention
from linattn.models.token_model import TokenModel
from linattn.nn.modes import evaluating
from linattn.types import TokenIds

Prompts = Sequence[Sequence[int]] | TokenIds
Logits = Float[Tensor, "b v"]
# True for the tokens that a row has
Seen = Bool[Tensor, "b v"]
PREFILL = 8192
"""The length of the pieces in which prompts are read, so that long ones cost no memory."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The way to draw the next token from the logits: first the penalty, then temperature, top_k, top_p and filter.

    `temperature` divides the logits; 0 takes the most likely token. `top_k` keeps the k most likely, `top_p` the fewest
    that reach probability p together (both need a temperature above 0), `filter` is any function of logits to logits.
    `repetition_penalty` concerns the tokens that were there before, in the prompt too: it divides positive logits and
    multiplies negative ones, so 1 does nothing (Keskar et al., https://arxiv.org/abs/1909.05858)."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    filter: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        # written so that NaN, which compares false with everything, is refused
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative, but is {self.temperature}")
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            raise ValueError(f"top_k must be a positive integer, but is {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], but is {self.top_p}")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise ValueError("top_k and top_p choose what is drawn from: with temperature 0, the default, nothing is")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be positive and finite, but is {self.repetition_penalty}")


GREEDY = Sampling()


def generate(
    model: TokenModel,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
    state: Any = None,
) -> list[list[int]]:
    """Return the new tokens of each row, including a stop token. See `stream`."""
    options = {"sampling": sampling, "stop_tokens": stop_tokens, "seed": seed, "state": state}
    steps = list(stream(model, prompts, max_new_tokens=max_new_tokens, **options))
    return [[token for step in steps if (token := step[row]) is not None] for row in range(len(prompts))]


def stream(
    model: TokenModel,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
    state: Any = None,
) -> Iterator[list[int | None]]:
    """Yield in each step one token per row, None for a row that has stopped (its stop token is given).

    The `model` is a causal one with logits. `prompts` are rows of tokens, of any lengths but zero; each gets
    `max_new_tokens` more, drawn as `sampling` says, unless one of `stop_tokens` comes first. ValueError if a token is
    not in the vocabulary, or if the model's positions do not suffice.

    `state` is the state after the tokens before the prompts, from `extend`; or, for a decoder, that of its context,
    from `begin`.
    With a `seed` the draws are the same every time and touch no other randomness; without one they come from torch's
    default generator. A row's logits are those it would have alone, but its draws depend on its place in the batch."""
    # a stack without attention does not say whether it is causal
    if not model.causal and any(isinstance(part, InnerAttention) for part in model.modules()):
        raise ValueError(f"generation needs a causal model, but this {type(model).__name__} is not")
    rows = _checked_rows(prompts, stop_tokens, model.vocab_size)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, but is {max_new_tokens}")
    length, limit = max(map(len, rows)) + max(max_new_tokens - 1, 0), model.max_length
    if limit is not None and length > limit:
        raise ValueError(f"the model's positions end at {limit}, but prompt and new tokens need {length}")
    stops = frozenset(stop_tokens)
    generator = None if seed is None else torch.Generator(model.device).manual_seed(seed)

    # what it yields are Python's numbers, so that no tensor of this mode, which takes no part in a gradient, gets out
    @torch.inference_mode()
    def steps() -> Iterator[list[int | None]]:
        logits, past, seen = _prefill(model, rows, state)
        stopped = [False] * len(rows)
        for remaining in reversed(range(max_new_tokens)):
            tokens = draw(logits, sampling, seen, generator).unsqueeze(1)
            seen.scatter_(1, tokens, True)
            new = tokens.squeeze(1).tolist()
            yield [None if stop else token for stop, token in zip(stopped, new, strict=True)]
            stopped = [stop or token in stops for stop, token in zip(stopped, new, strict=True)]
            if all(stopped) or not remaining:
                return
            with evaluating(model):
                x, past = model.extend_hidden(tokens, past)
                logits = model.logits(x.squeeze(1))

    return steps()


def _checked_rows(prompts: Any, stop_tokens: Collection[int], vocab_size: int) -> list[list[int]]:
    try:
        given = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        rows = [[operator.index(token) for token in prompt] for prompt in given]
    except TypeError as error:
        raise ValueError(
            f"prompts must be rows of tokens, [[1, 2]] for a single one, but are {prompts!s:.60}"
        ) from error
    if not rows or not all(rows):
        raise ValueError("each prompt needs at least one token to go on from, but there is an empty one")
    for name, tokens in (*(("a prompt", row) for row in rows), ("stop_tokens", stop_tokens)):
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise ValueError(f"tokens must be in [0, {vocab_size}), but {name} has {wrong[0]}")
    return rows


def _prefill(model: TokenModel, rows: list[list[int]], state: Any) -> tuple[Logits, Any, Seen]:
    """Return the logits after each prompt, the state, and a mask of the tokens that each prompt has."""
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    longest = int(lengths.max())
    # the padding repeats a token of its own row, so it adds none to those seen
    tokens = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows], device=model.device)
    seen = torch.zeros(len(rows), model.vocab_size, dtype=torch.bool, device=model.device).scatter_(1, tokens, True)
    present = torch.arange(longest, device=model.device) < lengths.unsqueeze(1)
    ragged, last = not bool(present.all()), None
    for start in range(0, longest, PREFILL):
        piece = slice(start, start + PREFILL)
        with evaluating(model):
            x, state = model.extend_hidden(tokens[:, piece], state, key_mask=present[:, piece] if ragged else None)
        index = (lengths - 1 - start).clamp(0, x.shape[1] - 1)
        here = x[torch.arange(len(rows), device=x.device), index]
        last = here if last is None else torch.where((lengths > start).unsqueeze(1), here, last)
    assert last is not None and state is not None
    return model.logits(last), state, seen


def draw(logits: Logits, sampling: Sampling, seen: Seen, generator: torch.Generator | None = None) -> Int[Tensor, " b"]:
    """Draw the next token of each row; `seen` is True for the tokens that are penalised."""
    logits = logits.float()
    logits = penalised(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p is not None:
        logits = nucleus(logits, sampling.top_p)
    if sampling.filter is not None:
        logits = sampling.filter(logits)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def penalised(logits: Logits, seen: Seen, penalty: float) -> Logits:
    """Make the tokens that were seen less likely, the more the larger the penalty; 1 changes nothing."""
    if penalty == 1:
        return logits
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def nucleus(logits: Logits, top_p: float) -> Logits:
    """Remove the least likely tokens, as many as together stay within probability 1 - p."""
    ascending, order = logits.sort(dim=-1)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[:, -1] = False
    return logits.masked_fill(torch.zeros_like(removed).scatter_(1, order, removed), -math.inf)
