"""Drafts: guesses of the next tokens, which a model checks all in one call, as it reads a prompt. A call with a few
tokens takes hardly longer than one with a single token, so each right guess saves a call. The tokens are those that
would have been drawn without a draft, but for rounding: wrong guesses cost time only.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding, https://arxiv.org/abs/2211.17192"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, final

import torch
from torch import Tensor

from linattn.checks import check_sizes, check_types
from linattn.models.token_model import TokenModel
from linattn.nn.modes import evaluating
from linattn.ops.nested import for_batch
from linattn.states import concatenate, select
from linattn.states.requirements import require_causal

WAITING = 16
"""As many tokens may wait to be read again with a draft; then they are read without one."""
FEWEST = 8
"""The number of guesses of a first draft. It doubles while all are right."""
CANDIDATES = 32
"""The number of earlier places that are compared with the end of a text."""


class Draft(ABC):
    """Guesses the next tokens of one text. `drafted` and `accepted` count the tokens that were guessed and, of them,
    those that the model would have drawn, for all texts so far."""

    def __init__(self) -> None:
        self.drafted = self.accepted = 0

    def check(self, model: TokenModel) -> None:  # noqa: B027
        """Raise ValueError if these guesses are none for `model`."""

    @abstractmethod
    def begin(self) -> None:
        """Forget the text before: another one begins. Each row of a batch has a shallow copy of the draft, so what
        belongs to the text must be new objects."""

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the text."""

    @abstractmethod
    def propose(self, count: int) -> Sequence[int]:
        """Return at most `count` tokens that may come next, or none."""


@final
class PromptLookup(Draft):
    """Guesses that the text repeats itself: it proposes the tokens, at most `max_tokens`, that followed an earlier
    occurrence of the text's last tokens. Of the last occurrences of its last `shortest` tokens it takes the one that
    agrees with the end of the text in the most tokens, up to `longest`, and the last of equally long ones.

    `shortest=3` suits tokens that are bytes; with larger tokens, 2 finds more.
    https://github.com/apoorvumang/prompt-lookup-decoding"""

    @check_types
    def __init__(self, *, max_tokens: int = 64, longest: int = 8, shortest: int = 3):
        check_sizes(max_tokens=max_tokens, longest=longest, shortest=shortest)
        if shortest > longest:
            raise ValueError(f"shortest must be at most longest, {longest}, but is {shortest}")
        super().__init__()
        self.max_tokens, self.longest, self.shortest = max_tokens, longest, shortest
        self.begin()

    def begin(self) -> None:
        self._tokens = list[int]()
        # where each run of `shortest` tokens ended last, and for each end of a run the one before
        self._ends = dict[tuple[int, ...], int]()
        self._earlier = list[int | None]()

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            run = tuple(self._tokens[-self.shortest :])
            self._earlier.append(self._ends.get(run))
            self._ends[run] = len(self._tokens)

    def propose(self, count: int) -> Sequence[int]:
        end = self._best_end()
        if end is None:
            return ()
        count, period = min(count, self.max_tokens), len(self._tokens) - end
        guesses = self._tokens[end : end + count]
        # what ends with the text itself goes round
        for i in range(period, count):
            guesses.append(guesses[i - period])
        return guesses

    def _best_end(self) -> int | None:
        best, most, end = None, 0, self._earlier[-1] if self._earlier else None
        for _ in range(CANDIDATES):
            if end is None or most == self.longest:
                break
            if (size := self._agreement(end)) > most:
                best, most = end, size
            end = self._earlier[end - 1]
        return best

    def _agreement(self, end: int) -> int:
        """Return how many tokens before `end` are those at the end of the text, at least `shortest`."""
        size, most = self.shortest, min(self.longest, end)
        while size < most and self._tokens[end - size - 1] == self._tokens[-size - 1]:
            size += 1
        return size


@final
class ModelDraft(Draft):
    """Takes as guesses the most likely tokens of a smaller `model` with the same vocabulary, `max_tokens` at a time."""

    @check_types
    def __init__(self, model: TokenModel, *, max_tokens: int = 4):
        check_sizes(max_tokens=max_tokens)
        require_causal(model, "a draft")
        super().__init__()
        self.model, self.max_tokens = model, max_tokens
        self.begin()

    def check(self, model: TokenModel) -> None:
        if self.model.vocab_size != model.vocab_size:
            raise ValueError(f"the draft's model has {self.model.vocab_size} tokens, but the model {model.vocab_size}")

    def begin(self) -> None:
        self._state: Any = None
        self._unread, self._length = list[int](), 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._unread += tokens
        self._length += len(tokens)

    @torch.inference_mode()
    def propose(self, count: int) -> Sequence[int]:
        guesses, state, unread = list[int](), self._state, self._unread
        count = min(count, self.max_tokens)
        if self.model.max_length is not None:
            # the last guess is not read
            count = min(count, self.model.max_length - self._length + 1)
        with evaluating(self.model):
            while len(guesses) < count:
                x, state = self.model.extend_hidden(torch.tensor([unread], device=self.model.device), state)
                if not guesses:
                    self._state, self._unread = state, []
                unread = [int(self.model.logits(x[:, -1]).argmax())]
                guesses += unread
        return guesses


class DraftedRow:
    """A text that is decoded with a draft. The tokens `waiting` are read in the next call, together with `guesses`. The
    first token waits already: it comes from the logits after the prompt."""

    def __init__(self, draft: Draft, prompt: list[int], count: int):
        self.counts, self.draft = draft, copy(draft)
        self.draft.begin()
        self.draft.extend(prompt)
        self.remaining, self.new = count, list[int]()
        self.waiting, self.guesses = list[int](), list[int]()
        self.advances = True
        """True if the state after the last call is the next one: all its guesses were right."""
        self._length, self._mean, self._pause, self._pauses = FEWEST, 2.0, 1, 0

    def guess(self) -> list[int]:
        """Return the tokens to be read: those that wait, and new guesses. There are none when the text has ended."""
        self.guesses = []
        if not self.remaining:
            return []
        self._pauses -= 1
        count = min(self._length, self.remaining - 1) if len(self.waiting) < WAITING and self._pauses < 0 else 0
        if count > 0:
            self.guesses = list(self.draft.propose(count))[:count]
        return [*self.waiting, *self.guesses]

    def accept(self, tokens: list[int], *, ends: bool) -> None:
        """Take the tokens that were drawn: the guesses that were right and one more, with which the text may end."""
        right = len(tokens) - 1
        self.draft.extend(tokens)
        self.new += tokens
        self.remaining = 0 if ends else self.remaining - len(tokens)
        self.advances = right == len(self.guesses)
        self.waiting = tokens[-1:] if self.advances else self.waiting + tokens
        if self.guesses:
            self.counts.drafted += len(self.guesses)
            self.counts.accepted += right
            self._adapt(right)

    def _adapt(self, right: int) -> None:
        """Guess more while all are right. Pause, longer each time, while there are few right guesses per draft."""
        self._length = 2 * len(self.guesses) if self.advances else max(FEWEST, min(right, self._length // 2))
        self._mean = 0.8 * self._mean + 0.2 * min(right, FEWEST)
        self._pause = 1 if self._mean >= 0.6 else self._pause if right else min(2 * self._pause, 16)
        self._pauses = self._pause if self._mean < 0.6 else 0


class DraftedBatch:
    """Texts that are decoded with a draft, one per row. If all guesses of a row are right, the row goes on from the
    state after the call. Otherwise this state has read wrong tokens: the row keeps the state before the call, and the
    next call reads the right tokens again."""

    def __init__(self, model: TokenModel, draft: Draft, state: Any, prompts: list[list[int]], count: int):
        self.model, self.state = model, for_batch(state, len(prompts))
        self._after = self.state
        self.rows = [DraftedRow(draft, prompt, count) for prompt in prompts]

    def read(self) -> list[Tensor]:
        """Return each row's logits (m + 1, v) after its last token and each of m guesses; none if it has ended."""
        x = self._extend([row.guess() for row in self.rows])
        sizes = [len(row.guesses) + 1 if row.remaining else 0 for row in self.rows]
        ends = [len(row.waiting) + len(row.guesses) for row in self.rows]
        last = [each[end - size : end] for each, end, size in zip(x, ends, sizes, strict=True)]
        return list(self.model.logits(torch.cat(last)).split(sizes))

    def finish(self) -> Any:
        """Return the state after all tokens."""
        if any(row.waiting for row in self.rows):
            self._extend([row.waiting for row in self.rows])
        return self._after

    def _extend(self, pieces: list[list[int]]) -> Tensor:
        advances = [row.advances for row in self.rows]
        if all(advances):
            self.state = self._after
        elif any(advances):
            chosen = [i + len(pieces) * advance for i, advance in enumerate(advances)]
            self.state = select(concatenate([self.state, self._after]), chosen)
        lengths = torch.tensor([len(piece) for piece in pieces])
        longest = int(lengths.max())
        tokens = torch.tensor([piece + [0] * (longest - len(piece)) for piece in pieces], device=self.model.device)
        present = torch.arange(longest) < lengths.unsqueeze(1)
        mask = None if bool(present.all()) else present.to(tokens.device)
        with evaluating(self.model):
            x, self._after = self.model.extend_hidden(tokens, self.state, key_mask=mask)
        for row in self.rows:
            # no token of a text that has ended is read
            row.advances = not row.remaining
        return x
