"""Generation with a language model, for prompts of any lengths in one batch, in constant memory per token."""

import operator
from collections.abc import Collection, Generator, Iterator, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple, Required, TypedDict, Unpack, overload

import torch
from jaxtyping import Int
from torch import Tensor

from linattn.checks import check_sizes, check_types
from linattn.generation.drafts import Draft, Verification
from linattn.generation.sampling import GREEDY, Logits, Sampling, Seen, draw
from linattn.generation.texts import TextCoder, is_text
from linattn.models.token_model import TokenModel, require_causal
from linattn.nn.modes import evaluating
from linattn.ops.nested import map_state

Prompts = Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "..."]
PREFILL = 8192
"""The length of the pieces in which prompts are read, so that long ones cost no memory."""


class _Options(TypedDict, total=False):
    """The keywords of `generate` but for `return_state`, for its types."""

    max_new_tokens: Required[int]
    sampling: Sampling
    stop_tokens: Collection[int]
    seed: int | None
    state: Any
    draft: Draft | None


@overload
def generate(
    model: TokenModel, prompts: Any, *, return_state: Literal[True], **options: Unpack[_Options]
) -> tuple[Any, Any]: ...
@overload
def generate(  # pyright: ignore[reportOverlappingOverload]: a string is a sequence of strings, too
    model: TokenModel, prompts: str, **options: Unpack[_Options]
) -> str: ...
@overload
def generate(model: TokenModel, prompts: Sequence[str], **options: Unpack[_Options]) -> list[str]: ...
@overload
def generate(model: TokenModel, prompts: Sequence[int], **options: Unpack[_Options]) -> list[int]: ...
@overload
def generate(
    model: TokenModel, prompts: Sequence[Sequence[int]] | Tensor, **options: Unpack[_Options]
) -> list[list[int]]: ...
@check_types
def generate(
    model: TokenModel,
    prompts: Prompts | str | Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
    state: Any = None,
    draft: Draft | None = None,
    return_state: bool = False,
) -> Any:
    """Return the new tokens of each row, including a stop token, as lists; for a single prompt, [1, 2], return one
    list. See `stream`.

    `prompts` may be a string, or strings, if the model has a tokenizer, which `LanguageModel.load` finds in the folder.
    The results are then strings. A prompt is the beginning of a document unless a `state` comes before it, and
    generation stops at the end of the document.

    With `return_state`, return them and the state after all of them, for the next call: a conversation goes on."""
    coder, rows = None, _rows(prompts)
    single = rows is not prompts
    if is_text(rows):
        coder = TextCoder(model)
        rows, stop_tokens = coder.encode(rows, begins=state is None), (*stop_tokens, *coder.stop_tokens)
    sampler = Sampler.checked(model, rows, max_new_tokens, sampling, stop_tokens, seed, draft, return_state)
    new, steps = [list[int]() for _ in sampler.rows], sampler.steps(state)
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            results: list[Any] = new if coder is None else [coder.decode(row) for row in new]
            result = results[0] if single else results
            # copies, as tensors of inference mode take no part in training
            return (result, map_state(torch.clone, end.value)) if return_state else result
        for row, token in zip(new, step, strict=True):
            row.extend([] if token is None else [token])


@check_types
def stream(
    model: TokenModel,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
    state: Any = None,
    draft: Draft | None = None,
) -> Iterator[list[int | None]]:
    """Yield in each step one token per row, None for a row that has stopped (its stop token is given).

    The `model` is a causal one with logits. `prompts` are rows of tokens, of any lengths but zero, or the tokens of a
    single one; each gets `max_new_tokens` more, drawn as `sampling` says, unless one of `stop_tokens` comes first.
    ValueError if a token is not in the vocabulary, or if the model's positions do not suffice.

    `state` is the state after the tokens before the prompts, from `extend`; or, for a decoder, that of its context,
    from `begin`. A `draft`, for a single prompt, guesses tokens, which cost less than others where they are right; the
    tokens that come are the same, but for rounding.
    With a `seed` the draws are the same every time and touch no other randomness; without one they come from torch's
    default generator. A row's logits are those it would have alone, but its draws depend on its place in the batch."""
    rows = _rows(prompts)
    sampler = Sampler.checked(model, rows, max_new_tokens, sampling, stop_tokens, seed, draft, False)
    return sampler.steps(state)


class Sampler(NamedTuple):
    """The arguments of `stream`, checked."""

    model: TokenModel
    rows: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    stops: frozenset[int]
    seed: int | None
    draft: Draft | None
    complete: bool
    """True if the state after the last tokens is wanted, for which one more token is read."""

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
    ) -> "Sampler":
        require_causal(model, "generation")
        rows = _checked_rows(prompts, stop_tokens, model.vocab_size)
        check_sizes(max_new_tokens=max_new_tokens, least=0)
        length, limit = max(map(len, rows)) + max(max_new_tokens - (not complete), 0), model.max_length
        if limit is not None and length > limit:
            raise ValueError(f"the model's positions end at {limit}, but prompt and new tokens need {length}")
        if seed is not None and not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed must be in [−2⁶³, 2⁶⁴), as torch's generators take it, but is {seed}")
        if draft is not None and not isinstance(draft, Draft):
            raise ValueError(f"draft must be a Draft, such as PromptLookup(), but is a {type(draft).__name__}")
        if draft is not None and len(rows) > 1:
            raise ValueError(f"a draft guesses the tokens of one prompt, but there are {len(rows)}")
        return cls(model, rows, max_new_tokens, sampling, frozenset(stop_tokens), seed, draft, complete)

    def generator(self) -> torch.Generator | None:
        return None if self.seed is None else torch.Generator(self.model.device).manual_seed(self.seed)

    # what it yields are Python's numbers, so that no tensor of this mode, which takes no part in a gradient, gets out
    @torch.inference_mode()
    def steps(self, state: Any) -> Generator[list[int | None], None, Any]:
        """Yield as `stream` does. Return the state after the last tokens if it is wanted."""
        if self.draft is not None:
            return (yield from self._drafted(self.draft, state))
        generator, (logits, state, seen) = self.generator(), _prefill(self.model, self.rows, state)
        stopped = [False] * len(self.rows)
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
            present = ~torch.tensor(before, device=tokens.device).unsqueeze(1) if masked else None
            with evaluating(self.model):
                x, state = self.model.extend_hidden(tokens, state, key_mask=present)
                if ends:
                    return state
                logits = self.model.logits(x.squeeze(1))
        return state

    def _drafted(self, draft: Draft, state: Any) -> Generator[list[int | None], None, Any]:
        (row,), generator = self.rows, self.generator()
        seen = torch.zeros(1, self.model.vocab_size, dtype=torch.bool, device=self.model.device)
        seen[0, row] = True
        if row[:-1]:
            state = _prefill(self.model, [row[:-1]], state)[1]
        text, count, ends = Verification(self.model, draft, state, row), 0, not self.max_new_tokens
        while not ends:
            logits, new = text.read(self.max_new_tokens - count), list[int]()
            for each, guess in zip(logits.split(1), [*text.guesses, None], strict=True):
                token = int(draw(each, self.sampling, seen, generator))
                seen[0, token] = True
                new.append(token)
                yield [token]
                if token != guess or token in self.stops:
                    break
            text.accept(new)
            count += len(new)
            ends = count == self.max_new_tokens or new[-1] in self.stops
        return text.finish() if self.complete else None


def _rows(prompts: Any) -> Any:
    """Return the prompts, in a list if it is a single one: a string, whole numbers or a tensor of one dimension."""
    if isinstance(prompts, Tensor):
        return [prompts.tolist()] if prompts.ndim == 1 else prompts
    first = prompts[0] if isinstance(prompts, Sequence) and prompts else None
    return [prompts] if isinstance(prompts, str) or isinstance(first, Integral) else prompts


def _checked_rows(prompts: Any, stop_tokens: Collection[int], vocab_size: int) -> list[list[int]]:
    try:
        given = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        rows = [[operator.index(token) for token in prompt] for prompt in given]
    except TypeError as error:
        raise ValueError(
            f"prompts must be tokens, [1, 2], or rows of them, [[1, 2], [3]], but are {prompts!s:.60}"
        ) from error
    try:
        stop_tokens = [operator.index(token) for token in stop_tokens]
    except TypeError as error:
        raise ValueError(f"stop_tokens must be tokens, (2,) for a single one, but are {stop_tokens!r:.60}") from error
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
