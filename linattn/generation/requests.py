"""Requests for generated text."""

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from linattn.checks import check_fields, check_sizes
from linattn.generation.sampling import GREEDY, Sampling


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
