"""Requests for generated text, and their rows in a continuous batch."""

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.checks import check_fields, check_sizes
from linattn.generation.decoding import Sampler
from linattn.generation.sampling import GREEDY, Sampling
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.ops.nested import map_state
from linattn.states import PrefixCache, select


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt, and how to go on: what `generate` takes for a single row.

    `prompt` is a row of at least one token; `max_new_tokens` is at least 1; `sampling`, `stop_tokens` and `seed` are
    those of `generate`; `state` is the state after the tokens before the prompt, with one row."""

    prompt: Sequence[int] | Int[Tensor, " n"]
    _: KW_ONLY
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop_tokens: Collection[int] = ()
    seed: int | None = None
    state: Any = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_sizes(max_new_tokens=self.max_new_tokens)
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling must be a Sampling, but is a {type(self.sampling).__name__}")


class BatchState(NamedTuple):
    """The running rows of a batch and their last `tokens`. Without `logits`, `state` is the state before these tokens,
    which the next call reads; then `logits` and `state` are those after them. `seen` marks the tokens of each row's
    text. The rows are the first dimension of all tensors, so that `select` and `concatenate` take this tuple."""

    state: TokenModelState
    seen: Bool[Tensor, "b v"]
    tokens: Int[Tensor, "b 1"]
    logits: Float[Tensor, "b v"] | None


class Row:
    """A request in a batch, with its `text`, the prompt and the new tokens. `state` is the state after the first
    `num_tokens` of them. The last token of the text is always left to the batch's next step. Once the row is part of
    the batch, `state` is None."""

    def __init__(self, sampler: Sampler, state: TokenModelState, cache: PrefixCache | None) -> None:
        self.sampler, self.cache, self.start = sampler, cache, state
        (prompt,) = sampler.rows
        self.text, self.num_new, self.num_tokens = list(prompt), 0, 0
        self.state: TokenModelState | None = None
        self.generator = sampler.generator()
        self.states = dict[int, TokenModelState]()
        """The states for the cache, by numbers of tokens."""

    @property
    def unread(self) -> int:
        return len(self.text) - 1 - self.num_tokens

    @property
    def ended(self) -> bool:
        return self.num_new == self.sampler.max_new_tokens or self.text[-1] in self.sampler.stops

    def begin(self) -> None:
        """Begin to read the text, after its longest beginning whose state is in the cache."""
        self.num_tokens, self.state = 0, self.start
        if self.cache is not None:
            self.num_tokens, state = self.cache.find(self.text[:-1])
            self.state = self.start if state is None else state

    def piece(self, longest: int) -> list[int]:
        """Return the next tokens, which end where the cache keeps a state."""
        stop = min(self.num_tokens + longest, len(self.text) - 1)
        if self.cache is not None:
            stop = min(stop, self.num_tokens + self.cache.every - self.num_tokens % self.cache.every)
        return self.text[self.num_tokens : stop]

    def advance(self, count: int, state: TokenModelState) -> None:
        self.num_tokens, self.state = self.num_tokens + count, state
        if self.cache is not None and (not self.unread or not self.num_tokens % self.cache.every):
            self.states[self.num_tokens] = _ordinary(state)
        if self.cache is not None and not self.unread:
            self.cache.put(self.text, self.states)
            self.states.clear()

    def first(self, model: TokenModel) -> BatchState:
        """Return this row, whose text is read but for the last token, as a batch of one row."""
        assert self.state is not None and not self.unread
        tokens = torch.tensor([self.text], device=model.device)
        seen = torch.zeros(1, model.vocab_size, dtype=torch.bool, device=model.device)
        return BatchState(self.state, seen.scatter(1, tokens, True), tokens[:, -1:], None)

    def append(self, token: int) -> None:
        self.text.append(token)
        self.num_new += 1

    def keep(self, state: TokenModelState, place: int) -> None:
        """Let the cache keep the state after all tokens but the last, which no call has read."""
        if self.cache is not None:
            text = self.text[:-1]
            self.cache.put(text, {len(text): _ordinary(select(state, [place]))})


def _ordinary(state: TokenModelState) -> TokenModelState:
    """Return the state with copies of tensors that inference mode has made: unlike these, copies can be used in
    training, as all states in a cache can."""
    with torch.inference_mode(False):
        return map_state(torch.clone, state)
