"""Generation with a language model: from tokens or text, all at once or token by token."""

from collections.abc import Collection, Iterator, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from linattn.checks import check_types
from linattn.generation.decoding import Prompts, Sampler
from linattn.generation.drafts import Draft
from linattn.generation.sampling import GREEDY, Sampling
from linattn.generation.texts import Decoder, TextCoder, is_text
from linattn.models.token_model import TokenModel
from linattn.ops.nested import map_state
from linattn.states.requirements import require_causal


class _Options(TypedDict, total=False):
    """The keywords of `stream`, for types."""

    max_new_tokens: Required[int]
    sampling: Sampling
    stop_tokens: Collection[int]
    seed: int | None
    state: Any
    draft: Draft | None
    compile: bool


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
    compile: bool = False,
    return_state: bool = False,
) -> Any:
    """Return the new tokens of each row, including a stop token, as lists; for a single prompt, [1, 2], return one
    list. For text, return text. See `stream`.

    With `return_state`, return them and the state after all of them, for the next call: a conversation goes on."""
    options = max_new_tokens, sampling, stop_tokens, seed, draft, return_state, compile
    call = _Call.checked(model, prompts, options, begins=state is None)
    new, steps = [list[int]() for _ in call.sampler.rows], call.sampler.steps(state)
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            pairs = zip(new, call.sampler.rows, strict=True)
            results: list[Any] = new if call.coder is None else [call.coder.decode(*pair) for pair in pairs]
            result = results[0] if call.single else results
            # copies, as tensors of inference mode take no part in training
            return (result, map_state(torch.clone, end.value)) if return_state else result
        for row, token in zip(new, step, strict=True):
            row.extend([] if token is None else [token])


@overload
def stream(  # pyright: ignore[reportOverlappingOverload]: a string is a sequence of strings, too
    model: TokenModel, prompts: str, **options: Unpack[_Options]
) -> Iterator[str]: ...
@overload
def stream(model: TokenModel, prompts: Sequence[str], **options: Unpack[_Options]) -> Iterator[list[str | None]]: ...
@overload
def stream(model: TokenModel, prompts: Sequence[int], **options: Unpack[_Options]) -> Iterator[int]: ...
@overload
def stream(
    model: TokenModel, prompts: Sequence[Sequence[int]] | Tensor, **options: Unpack[_Options]
) -> Iterator[list[int | None]]: ...
@check_types
def stream(
    model: TokenModel,
    prompts: Prompts | str | Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_tokens: Collection[int] = (),
    seed: int | None = None,
    state: Any = None,
    draft: Draft | None = None,
    compile: bool = False,
) -> Iterator[Any]:
    """Yield in each step one token per row: the stop token too, and None after it. For a single prompt, [1, 2], yield
    its tokens.

    The `model` is a causal one with logits. `prompts` are rows of tokens, of any lengths but zero, or the tokens of a
    single one; each gets `max_new_tokens` more, drawn as `sampling` says, unless one of `stop_tokens` comes first.
    ValueError if a token is not in the vocabulary, or if the model's positions do not suffice for the tokens before
    the `state`, the prompts and the new ones.

    `prompts` may be a string, or strings, if the model has a tokenizer, which `LanguageModel.load` finds in the folder.
    What is yielded is then text: the piece that each token completes, "" if there is none yet. A prompt is the
    beginning of a document unless a `state` comes before it, and generation stops at the end of the document.

    `state` is the state after the tokens before the prompts, from `extend`; or, for a decoder, that of its context,
    from `begin`. A `draft` guesses tokens, which cost less than others where they are right; the most likely tokens
    stay the same, but for rounding, and draws keep their distribution. Of several rows, each has its own guesses.
    With `compile`, torch.compile makes one graph of a step, which serves all tokens. The first call of a model takes a
    minute or so, and one with another number of rows again; attentions whose states grow, as softmax's, are refused.
    With a `seed` the draws are the same every time and touch no other randomness; without one they come from torch's
    default generator. A row's logits are those it would have alone, but its draws depend on its place in the batch."""
    options = max_new_tokens, sampling, stop_tokens, seed, draft, False, compile
    call = _Call.checked(model, prompts, options, begins=state is None)
    steps: Iterator[Any] = call.sampler.steps(state)
    steps = steps if call.coder is None else _texts(steps, call.sampler, call.coder)
    return (step for (step,) in steps) if call.single else steps


class _Call(NamedTuple):
    """The arguments of `generate` and `stream`, checked. `coder` is the tokenizer if the prompts are text; `single` is
    True for a prompt that is not in a list."""

    sampler: Sampler
    coder: TextCoder | None
    single: bool

    @classmethod
    def checked(cls, model: TokenModel, prompts: Any, options: tuple[Any, ...], *, begins: bool) -> "_Call":
        """Check the prompts, which begin documents if `begins`, and the other arguments of `Sampler.checked`."""
        require_causal(model, "generation")
        coder, rows = None, _rows(prompts)
        single = rows is not prompts
        if is_text(rows):
            coder = TextCoder(model)
            rows = coder.encode(rows, begins=begins)
        sampler = Sampler.checked(model, rows, *options)
        if coder is not None:
            sampler = sampler._replace(stops=sampler.stops.union(coder.stop_tokens))
        return cls(sampler, coder, single)


def _rows(prompts: Any) -> Any:
    """Return the prompts, in a list if it is a single one: a string, whole numbers or a tensor or numpy's array of one
    dimension."""
    if hasattr(prompts, "ndim"):
        return [prompts.tolist()] if prompts.ndim == 1 else prompts
    first = prompts[0] if isinstance(prompts, Sequence) and prompts else None
    return [prompts] if isinstance(prompts, str) or isinstance(first, Integral) else prompts


def _texts(steps: Iterator[list[int | None]], sampler: Sampler, coder: TextCoder) -> Iterator[list[str | None]]:
    decoders = [coder.decoder(prompt) for prompt in sampler.rows]

    def piece(decode: Decoder, token: int | None, last: bool) -> str | None:
        if token is None:
            return None
        return decode(token) + (decode(None) if last or token in sampler.stops else "")

    for count, step in enumerate(steps, 1):
        last = count == sampler.max_new_tokens
        yield [piece(decode, token, last) for decode, token in zip(decoders, step, strict=True)]
