"""The decoding of prompts of any lengths in one batch, in constant memory per token, with a draft or without."""

import operator
from collections.abc import Callable, Collection, Generator, Sequence
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.checks import check_sizes, plain_number
from linattn.generation.drafts import Draft, DraftedBatch
from linattn.generation.sampling import GREEDY, Logits, Sampling, Seen, draw, most_likely
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.nn.modes import evaluating
from linattn.ops.nested import checked_kind, for_batch, map_state
from linattn.states.requirements import require_constant_state

PREFILL = 8192
"""The length of the pieces in which prompts are read, so that long ones cost no memory."""
Prompts = Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "..."]


class Sampler(NamedTuple):
    """Draws the tokens of `stream`, whose checked arguments it holds."""

    model: TokenModel
    rows: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    stops: frozenset[int]
    seed: int | None
    draft: Draft | None
    complete: bool
    """True if the state after the last tokens is wanted, for which one more token is read."""
    compiled: bool

    @classmethod
    def checked(
        cls,
        model: TokenModel,
        prompts: Any,
        max_new_tokens: int,
        sampling: Sampling,
        stop_tokens: Collection[int],
        seed: int | None,
        draft: Draft | None,
        complete: bool,
        compiled: bool = False,
    ) -> "Sampler":
        rows, stops = _checked_tokens(prompts, stop_tokens, model.vocab_size)
        check_sizes(max_new_tokens=max_new_tokens, least=0)
        if seed is not None and not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed must be in [−2⁶³, 2⁶⁴), as torch's generators take it, but is {seed}")
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling must be a Sampling, but is a {type(sampling).__name__}")
        if draft is not None and not isinstance(draft, Draft):
            raise ValueError(f"draft must be a Draft, such as PromptLookup(), but is a {type(draft).__name__}")
        if draft is not None:
            draft.check(model)
        if draft is not None and compiled:
            raise ValueError("compile is for one token at a time, but a draft makes calls of many lengths: give one")
        if compiled:
            require_constant_state(model, "compile")
        max_new_tokens, seed = plain_number(max_new_tokens), plain_number(seed)
        return cls(model, rows, max_new_tokens, sampling, frozenset(stops), seed, draft, complete, compiled)

    def check_positions(self, state: TokenModelState | None) -> None:
        """Raise ValueError unless the model has positions for the tokens before `state`, the prompts and the new
        tokens."""
        if (limit := self.model.max_length) is None:
            return
        past = [0] * len(self.rows)
        if state is not None and (position := checked_kind(state, TokenModelState).position) is not None:
            past = for_batch(position, len(self.rows)).tolist()
        longest = max(before + len(row) for before, row in zip(past, self.rows, strict=True))
        length = longest + max(self.max_new_tokens - (not self.complete), 0)
        if length > limit:
            what = "state, prompt and new tokens" if any(past) else "prompt and new tokens"
            raise ValueError(f"the model's positions end at {limit}, but {what} need {length}")

    def generator(self) -> torch.Generator | None:
        return None if self.seed is None else torch.Generator(self.model.device).manual_seed(self.seed)

    def steps(self, state: Any) -> Generator[list[int | None], None, Any]:
        """Yield as `stream` does. Return the state after the last tokens if it is wanted."""
        self.check_positions(state)
        return self._steps(state) if self.draft is None else self._drafted(self.draft, state)

    # what it yields are Python's numbers, so that no tensor of this mode, which takes no part in a gradient, gets out
    @torch.inference_mode()
    def _steps(self, state: Any) -> Generator[list[int | None], None, Any]:
        generator, (logits, state, seen) = self.generator(), _prefill(self.model, self.rows, state)
        stopped, step = [False] * len(self.rows), _step
        if self.compiled:
            # prompts leave other strides than steps do, for which there would be another graph
            state, step = map_state(_contiguous, state), _compiled_step(self.model, len(self.rows))
        for remaining in reversed(range(self.max_new_tokens)):
            tokens = draw(logits, self.sampling, seen, generator).unsqueeze(1)
            seen.scatter_(1, tokens, True)
            new, before = tokens.squeeze(1).tolist(), stopped
            yield [None if stop else token for stop, token in zip(before, new, strict=True)]
            stopped = [stop or token in self.stops for stop, token in zip(before, new, strict=True)]
            ends = all(stopped) or not remaining
            if ends and not self.complete:
                return None
            # a state that is returned holds no token of a row after its stop token
            masked = self.complete and any(before)
            with evaluating(self.model):
                if masked:
                    present = ~torch.tensor(before, device=tokens.device).unsqueeze(1)
                    logits, state = _step(self.model, tokens, state, present)
                else:
                    logits, state = step(self.model, tokens, state)
        return state

    @torch.inference_mode()
    def _drafted(self, draft: Draft, state: Any) -> Generator[list[int | None], None, Any]:
        generator, (logits, state, seen) = self.generator(), _prefill(self.model, self.rows, state)
        batch, each = DraftedBatch(self.model, draft, state, self.rows, self.max_new_tokens), logits.split(1)
        count = 0
        while any(row.remaining for row in batch.rows):
            for i, (row, logits) in enumerate(zip(batch.rows, each, strict=True)):
                if row.remaining:
                    new = self._agreed(logits, row.guesses, seen[i : i + 1], generator)
                    row.accept(new, ends=new[-1] in self.stops)
            # rows with more right guesses wait for the others
            while any(len(row.new) > count for row in batch.rows) and not any(
                row.remaining and len(row.new) == count for row in batch.rows
            ):
                yield [row.new[count] if len(row.new) > count else None for row in batch.rows]
                count += 1
            if any(row.remaining for row in batch.rows):
                each = batch.read()
        return batch.finish() if self.complete else None

    def _agreed(
        self,
        logits: Float[Tensor, "m v"],
        guesses: Sequence[int],
        seen: Bool[Tensor, "1 v"],
        generator: torch.Generator | None,
    ) -> list[int]:
        """Draw tokens from the logits after the last token and after each of the guesses, up to one that was not
        guessed or that ends the text."""
        new, at_once = list[int](), self.sampling == GREEDY
        likely = most_likely(logits, GREEDY, seen.expand_as(logits)).tolist() if at_once else None
        for i, guess in enumerate([*guesses, None]):
            token = int(draw(logits[i : i + 1], self.sampling, seen, generator)) if likely is None else likely[i]
            seen[0, token] = True
            new.append(token)
            if token != guess or token in self.stops:
                break
        return new


def _step(
    model: TokenModel, tokens: Int[Tensor, "b 1"], state: Any, present: Bool[Tensor, "b 1"] | None = None
) -> tuple[Logits, Any]:
    x, state = model.extend_hidden(tokens, state, key_mask=present)
    return model.logits(x.squeeze(1)), state


def _contiguous_step(model: TokenModel, tokens: Int[Tensor, "b 1"], state: Any) -> tuple[Logits, Any]:
    logits, state = _step(model, tokens, state)
    return logits, map_state(_contiguous, state)


_COMPILED = WeakKeyDictionary[TokenModel, dict[int, Callable[..., tuple[Logits, Any]]]]()


def _compiled_step(model: TokenModel, rows: int) -> Callable[..., tuple[Logits, Any]]:
    """Return the compiled step of a model for so many rows, the same at every call."""
    steps = _COMPILED.setdefault(model, {})
    if rows not in steps:
        # a copy of the code, as torch compiles one function for a few calls of other shapes and models at most
        step = FunctionType(_contiguous_step.__code__.replace(), globals())
        steps[rows] = torch.compile(step, fullgraph=True, dynamic=False)
    return steps[rows]


def _contiguous(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _checked_tokens(prompts: Any, stop_tokens: Any, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Return the rows of the prompts, and the stop tokens, as Python's numbers."""
    try:
        given = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        rows = [[_whole_number(token) for token in prompt] for prompt in given]
    except TypeError as error:
        raise ValueError(
            f"prompts must be tokens, [1, 2], or rows of them, [[1, 2], [3]], but are {prompts!s:.60}"
        ) from error
    try:
        stops = [_whole_number(token) for token in stop_tokens]
    except TypeError as error:
        raise ValueError(f"stop_tokens must be tokens, (2,) for a single one, but are {stop_tokens!r:.60}") from error
    if not rows or not all(rows):
        raise ValueError("each prompt needs at least one token to go on from, but there is an empty one")
    for name, tokens in (*(("a prompt", row) for row in rows), ("stop_tokens", stops)):
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise ValueError(f"tokens must be in [0, {vocab_size}), but {name} has {wrong[0]}")
    return rows, stops


def _whole_number(token: Any) -> int:
    if isinstance(token, bool):
        raise TypeError("true and false are no tokens, but a mask")
    return operator.index(token)


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
