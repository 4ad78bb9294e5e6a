"""Drafts: guesses of the next tokens, which a model checks all in one call, as it reads a prompt. A call with a few
tokens takes hardly longer than one with a single token, so each right guess saves a call. The tokens are those that
would have been drawn without a draft, but for rounding: wrong guesses cost time only.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding, https://arxiv.org/abs/2211.17192"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from linattn.checks import check_sizes, check_types
from linattn.models.token_model import TokenModel
from linattn.nn.modes import evaluating

# as many tokens may wait to be read again with a draft; then they are read without one
WAITING = 16


class Draft(ABC):
    """Guesses the next tokens of one text. `drafted` and `accepted` count the tokens that were guessed and, of them,
    those that the model would have drawn, for all texts so far."""

    def __init__(self) -> None:
        self.drafted = self.accepted = 0

    @abstractmethod
    def begin(self) -> None:
        """Forget the text before: another one begins."""

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the text."""

    @abstractmethod
    def propose(self, count: int) -> Sequence[int]:
        """Return at most `count` tokens that may come next, or none."""


@final
class PromptLookup(Draft):
    """Guesses that the text repeats itself: what followed the last earlier place with the same `longest` tokens, or
    fewer, down to `shortest`, follows again. Up to `max_tokens` are proposed, fewer after wrong guesses.

    https://github.com/apoorvumang/prompt-lookup-decoding"""

    @check_types
    def __init__(self, *, max_tokens: int = 16, longest: int = 4, shortest: int = 2):
        check_sizes(max_tokens=max_tokens, longest=longest, shortest=shortest)
        if shortest > longest:
            raise ValueError(f"shortest must be at most longest, {longest}, but is {shortest}")
        super().__init__()
        self.max_tokens, self.sizes = max_tokens, range(longest, shortest - 1, -1)
        self.begin()

    def begin(self) -> None:
        self._tokens = list[int]()
        # where each run of tokens ended last, but for the end of the text
        self._ends = dict[tuple[int, ...], int]()

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for size in self.sizes:
                if len(self._tokens) >= size:
                    self._ends[tuple(self._tokens[-size:])] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, count: int) -> Sequence[int]:
        for size in self.sizes:
            end = self._ends.get(tuple(self._tokens[-size:])) if len(self._tokens) >= size else None
            if end is not None:
                return self._tokens[end : end + min(count, self.max_tokens)]
        return ()


@final
class ModelDraft(Draft):
    """Takes as guesses the most likely tokens of a smaller `model` with the same vocabulary, `max_tokens` at a time."""

    @check_types
    def __init__(self, model: TokenModel, *, max_tokens: int = 4):
        check_sizes(max_tokens=max_tokens)
        super().__init__()
        self.model, self.max_tokens = model, max_tokens
        self.begin()

    def begin(self) -> None:
        self._state: Any = None
        self._unread = list[int]()

    def extend(self, tokens: Sequence[int]) -> None:
        self._unread += tokens

    @torch.inference_mode()
    def propose(self, count: int) -> Sequence[int]:
        guesses, state, unread = list[int](), self._state, self._unread
        with evaluating(self.model):
            while len(guesses) < min(count, self.max_tokens):
                x, state = self.model.extend_hidden(torch.tensor([unread], device=self.model.device), state)
                if not guesses:
                    self._state, self._unread = state, []
                unread = [int(self.model.logits(x[:, -1]).argmax())]
                guesses += unread
        return guesses


class Verification:
    """The decoding of one text with a draft. `state` is that before the tokens `waiting`, which are read in the next
    call, together with the next guesses. If all of those are right, the state after them is the next one; otherwise it
    holds wrong tokens, and the right ones wait to be read again."""

    def __init__(self, model: TokenModel, draft: Draft, state: Any, prompt: list[int]):
        self.model, self.draft, self.state, self.waiting = model, draft, state, prompt[-1:]
        draft.begin()
        draft.extend(prompt)
        self.allowed = 4
        self.guesses: Sequence[int] = ()

    def read(self, remaining: int) -> Tensor:
        """Return the logits (m + 1, v) after the last token and after each of m guesses, at most `remaining` - 1."""
        count = min(self.allowed, remaining - 1) if len(self.waiting) < WAITING else 0
        self.guesses = list(self.draft.propose(count))[:count] if count > 0 else []
        tokens = torch.tensor([[*self.waiting, *self.guesses]], device=self.model.device)
        with evaluating(self.model):
            x, self._after = self.model.extend_hidden(tokens, self.state)
        return self.model.logits(x[0, -len(self.guesses) - 1 :])

    def accept(self, tokens: list[int]) -> None:
        """Take the tokens that were drawn from these logits: the guesses that were right and one more."""
        right = len(tokens) - 1
        self.draft.drafted += len(self.guesses)
        self.draft.accepted += right
        self.draft.extend(tokens)
        if right == len(self.guesses):
            self.state, self.waiting = self._after, tokens[-1:]
        else:
            self.waiting = self.waiting + tokens
        if self.guesses:
            # twice as many after right guesses, as many as were right after a wrong one
            self.allowed = 2 * self.allowed if right == len(self.guesses) else max(1, right)

    def finish(self) -> Any:
        """Return the state after all tokens."""
        with evaluating(self.model):
            return self.model.extend_hidden(torch.tensor([self.waiting], device=self.model.device), self.state)[1]
