"""Continuous batching: requests join and leave a running batch, and each gets the tokens that it would get alone.

Yu et al., Orca, https://www.usenix.org/conference/osdi22/presentation/yu"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch

from linattn.checks import check_instances, check_sizes, check_types, given
from linattn.generation.decoding import Sampler
from linattn.generation.requests import Request
from linattn.generation.rows import Row, RowGroup
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.nn.modes import evaluating
from linattn.states import PrefixCache, concatenate, select
from linattn.states.requirements import require_causal

PIECE = 2048
"""The tokens of prompts, of all rows together, that one step reads, so that a long prompt does not stall the others."""
SHORTEST = 256
"""One call reads at most PIECE / SHORTEST prompts, whose states it holds before and after it."""
ROWS = 64
"""The most rows of a call that generates. It holds one layer's states of its rows twice."""


class LogitsError(ValueError):
    """The model's logits of these `requests`, by their numbers, are such that no token can be drawn."""

    def __init__(self, requests: Sequence[int]) -> None:
        super().__init__("the logits of the model hold NaN or +∞, or −∞ for every token: nothing can be drawn")
        self.requests = list(requests)


class NewToken(NamedTuple):
    """The next `token` of the request with the number `request`, and whether it is the last: it is a stop token, or
    there are `max_new_tokens`."""

    request: int
    token: int
    last: bool


class ContinuousBatch:
    """Generates the tokens of many requests with one call of `model` per token, for at most `size` rows at a time.

    Requests may be added and cancelled between any two steps. Each gets the tokens that `generate` gives for it alone,
    but for rounding, whichever others are there; with a seed this holds for draws, too. Requests wait in the order in
    which they were added. Prompts are read in pieces, a piece per step, while the other rows go on.

    With a `cache` of the same model, prompts are read from their longest known beginning, and the states after prompts
    and after finished texts enter it. Requests share what the cache has if they go on from the same state. A batch is
    for one thread at a time."""

    @check_types
    def __init__(self, model: TokenModel, *, size: int = 16, cache: PrefixCache | None = None):
        require_causal(model, "generation")
        check_sizes(size=size)
        check_instances(PrefixCache, **given(cache=cache))
        if cache is not None and cache.model is not model:
            raise ValueError("the cache must hold states of the same model, but it is of another one")
        self.model, self.size, self.cache = model, size, cache
        self._count = 0
        self._waiting, self._reading, self._groups = dict[int, Row](), dict[int, Row](), list[RowGroup]()
        self._empty: TokenModelState | None = None

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return self.num_rows + self.num_waiting

    @property
    def num_rows(self) -> int:
        """The number of requests that are read or generated, at most `size`."""
        return len(self._reading) + sum(len(group.rows) for group in self._groups)

    @property
    def num_waiting(self) -> int:
        """The number of requests that no row is free for."""
        return len(self._waiting)

    @torch.no_grad()
    def add(self, request: Request) -> int:
        """Take a request and return its number: 0 for the first of this batch, and so on.

        Raises ValueError for what `generate` would not take, and for a state of another model."""
        if not isinstance(request, Request):
            raise ValueError(f"request must be a Request, but is a {type(request).__name__}")
        options = request.max_new_tokens, request.sampling, request.stop_tokens, request.seed
        sampler = Sampler.checked(self.model, [request.prompt], *options, draft=None, complete=False)
        state = self._begin(request.state)
        sampler.check_positions(state)
        number, self._count = self._count, self._count + 1
        self._waiting[number] = Row(number, sampler, state, request.state, self.cache)
        return number

    def cancel(self, number: int) -> None:
        """End a request: it gets no more tokens, and its row is free. Nothing changes if it has ended already.

        Raises ValueError if there was no such request."""
        if number not in range(self._count):
            raise ValueError(f"there are {self._count} requests, from 0 on, but {number} is to be cancelled")
        self._waiting.pop(number, None)
        self._reading.pop(number, None)
        self._leave([number])

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """Read a piece of the prompts that there are rows for, and return one more token of each row whose prompt is
        read. There is none if all requests have ended, or if only prompts were read.

        A step that raises an error changes nothing that is generated: the next one tries again, after an error of the
        model by reading the texts again. For logits of NaN the error is a LogitsError, which has the requests that are
        to be cancelled."""
        with evaluating(self.model):
            self._admit()
            self._read()
            self._join()
            for group in self._groups:
                # logits are there already after an error in another group, or in drawing from them
                if group.state.logits is None:
                    self._extend(group)
            return self._draw()

    def _begin(self, state: Any) -> TokenModelState:
        """Return the state, checked by the model, or, for None, that after no token."""
        if state is None and self._empty is not None:
            return self._empty
        none = torch.empty(1, 0, dtype=torch.long, device=self.model.device)
        with evaluating(self.model):
            _, begun = self.model.extend_hidden(none, state)
        self._empty = begun if state is None else self._empty
        return begun

    def _admit(self) -> None:
        while self._waiting and self.num_rows < self.size:
            number = next(iter(self._waiting))
            self._reading[number] = row = self._waiting.pop(number)
            row.begin()

    def _read(self) -> None:
        """Read the next piece of each prompt that is not read to the end. Pieces that are shorter than others are
        padded."""
        rows = [row for row in self._reading.values() if row.unread][: PIECE // SHORTEST]
        if not rows:
            return
        longest = max(SHORTEST, min(PIECE // len(rows), *(row.unread for row in rows)))
        pieces = [row.piece(longest) for row in rows]
        lengths = torch.tensor([len(piece) for piece in pieces])
        longest = int(lengths.max())
        tokens = torch.tensor([piece + [0] * (longest - len(piece)) for piece in pieces], device=self.model.device)
        present = (torch.arange(longest) < lengths.unsqueeze(1)).to(tokens.device)
        mask = None if bool((lengths == longest).all()) else present
        _, state = self.model.extend_hidden(tokens, concatenate([row.state for row in rows]), key_mask=mask)
        for i, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            row.advance(len(piece), select(state, [i]))

    def _join(self) -> None:
        """Let the rows whose prompts are read join a group: the next token that it reads is their prompts' last. Groups
        that have become small are joined, too."""
        ready = [row for row in self._reading.values() if not row.unread]
        waiting = [group for group in self._groups if group.state.logits is None]
        if not ready and len(waiting) < 2:
            return
        self._groups = [group for group in self._groups if group not in waiting]
        for row in ready:
            del self._reading[row.request]
        with self._reading_again([*ready, *(row for group in waiting for row in group.rows)]):
            singles = [RowGroup.of_row(self.model, row) for row in ready]
            packed = list[list[RowGroup]]()
            for group in sorted([*waiting, *singles], key=_size, reverse=True):
                fitting = (each for each in packed if sum(map(_size, each)) + _size(group) <= ROWS)
                if (each := next(fitting, None)) is None:
                    packed.append([group])
                else:
                    each.append(group)
            self._groups += [RowGroup.joined(each) for each in packed]

    def _leave(self, requests: Collection[int]) -> None:
        self._groups = [left for group in self._groups if (left := group.without(requests)).rows]

    def _extend(self, group: RowGroup) -> None:
        try:
            with self._reading_again(group.rows):
                group.extend()
        except BaseException:
            self._groups.remove(group)
            raise

    @contextmanager
    def _reading_again(self, rows: list[Row]) -> Iterator[None]:
        """Read the texts of the rows from the beginning if the block raises an error, which costs them their states."""
        try:
            yield
        except BaseException:
            self._reading |= {row.request: row for row in rows}
            for row in rows:
                row.begin()
            raise

    def _draw(self) -> list[NewToken]:
        if failed := [request for group in self._groups for request in group.undrawable()]:
            raise LogitsError(failed)
        # no generator moves before all distributions are known to be good
        pairs = [(group, group.distributions()) for group in self._groups]
        new = list[NewToken]()
        for group, distributions in pairs:
            tokens = zip(group.rows, group.draw(distributions), strict=True)
            new += [NewToken(row.request, token, row.ended) for row, token in tokens]
        if ended := {request for request, _, last in new if last}:
            self._leave(ended)
        return new


def _size(group: RowGroup) -> int:
    return len(group.rows)


def generate_each(
    model: TokenModel, requests: Iterable[Request], *, size: int = 16, cache: PrefixCache | None = None
) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of each of the `requests`, from 0 on, with its new tokens, in the order in which they end.

    `model`, `size` and `cache` are those of a `ContinuousBatch`. A request is taken from the iterable when a row is
    free for it."""
    check_instances(Iterable, requests=requests)
    batch = ContinuousBatch(model, size=size, cache=cache)
    return _each(batch, iter(requests))


def _each(batch: ContinuousBatch, requests: Iterator[Request]) -> Iterator[tuple[int, list[int]]]:
    texts = dict[int, list[int]]()
    while True:
        for request in islice(requests, batch.size - len(batch)):
            texts[batch.add(request)] = []
        if not batch:
            return
        for number, token, last in batch.step():
            texts[number].append(token)
            if last:
                yield number, texts.pop(number)
