"""Continuous batching: requests join and leave a running batch, and each gets the tokens that it would get alone.

Yu et al., Orca, https://www.usenix.org/conference/osdi22/presentation/yu"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.checks import check_sizes, check_types
from linattn.generation.decoding import Sampler
from linattn.generation.requests import BatchState, Request, Row
from linattn.generation.sampling import Sampling, most_likely, probabilities
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.nn.modes import evaluating
from linattn.states import PrefixCache, concatenate, select

PIECE = 2048
"""The tokens of prompts, of all rows together, that one step reads, so that a long prompt does not stall the others."""
SHORTEST = 64
"""The length to which shorter prompts are padded, so that one call reads at most PIECE / SHORTEST of them."""


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
    and after finished texts enter it; requests with a state of their own do without. A batch is for one thread at a
    time."""

    @check_types
    def __init__(self, model: TokenModel, *, size: int = 16, cache: PrefixCache | None = None):
        check_sizes(size=size)
        if cache is not None and cache.model is not model:
            raise ValueError("the cache must hold states of the same model, but it is of another one")
        self.model, self.size, self.cache = model, size, cache
        self._count = 0
        self._waiting, self._reading, self._running = dict[int, Row](), dict[int, Row](), dict[int, Row]()
        self._empty: TokenModelState | None = None
        self._batch: BatchState | None = None
        self._groups = list[_Group]()

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return self.num_rows + self.num_waiting

    @property
    def num_rows(self) -> int:
        """The number of requests that are read or generated, at most `size`."""
        return len(self._reading) + len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of requests that no row is free for."""
        return len(self._waiting)

    @torch.no_grad()
    def add(self, request: Request) -> int:
        """Take a request and return its number: 0 for the first of this batch, and so on.

        Raises ValueError for what `generate` would not take, and for a state of another model."""
        options = request.max_new_tokens, request.sampling, request.stop_tokens, request.seed
        sampler = Sampler.checked(self.model, [request.prompt], *options, draft=None, complete=False)
        state = self._begin(request.state)
        sampler.check_positions(state)
        number, self._count = self._count, self._count + 1
        self._waiting[number] = Row(sampler, state, self.cache if request.state is None else None)
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
            # logits are there already after an error in drawing from them
            if self._batch is None or self._batch.logits is None:
                self._admit()
                self._read()
                self._join()
                self._extend()
            return [] if self._batch is None else self._draw_next(self._batch)

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
        """Add the rows to the batch whose prompts are read but for the last token, which the batch's next call
        reads."""
        ready = {number: row for number, row in self._reading.items() if not row.unread}
        if ready:
            batches = [] if self._batch is None else [self._batch]
            self._batch = concatenate([*batches, *(row.first(self.model) for row in ready.values())])
            for number in ready:
                self._running[number] = self._reading.pop(number)
                self._running[number].state = None
            self._group()

    def _leave(self, numbers: Sequence[int]) -> None:
        if any(number in self._running for number in numbers):
            places = [i for i, number in enumerate(self._running) if number not in numbers]
            self._batch = None if self._batch is None or not places else select(self._batch, places)
            for number in numbers:
                self._running.pop(number, None)
            self._group()

    def _group(self) -> None:
        """Find the rows that are drawn alike. A filter sees one row, as it would alone."""
        groups = dict[Any, list[int]]()
        for place, row in enumerate(self._running.values()):
            sampling = row.sampler.sampling
            groups.setdefault(sampling if sampling.filter is None else place, []).append(place)
        rows = list(self._running.values())
        self._groups = [
            _Group(
                rows[places[0]].sampler.sampling,
                torch.tensor(places, device=self.model.device),
                [rows[i].generator for i in places],
            )
            for places in groups.values()
        ]

    def _extend(self) -> None:
        """Read the next token of each row that runs. The states before it are dropped one layer after another, so that
        all but one layer's are in memory once."""
        if self._batch is None:
            return
        (state, seen, tokens, _), self._batch = self._batch, None
        # no other name may hold the state
        state = state._replace(stack=deque(state.stack))
        try:
            x, state = self.model.extend_hidden(tokens, state)
            self._batch = BatchState(state, seen, tokens, self.model.logits(x[:, -1]))
        except BaseException:
            self._reading |= self._running
            for row in self._running.values():
                row.begin()
            self._running.clear()
            raise

    def _draw_next(self, batch: BatchState) -> list[NewToken]:
        assert batch.logits is not None
        drawable = batch.logits.amax(-1).isfinite().tolist()
        if not all(drawable):
            numbers = zip(self._running, drawable, strict=True)
            raise LogitsError([number for number, good in numbers if not good])
        drawn = self._draw(batch.logits, batch.seen)
        self._batch = BatchState(batch.state, batch.seen.scatter_(1, drawn, True), drawn, None)
        new, ended = list[NewToken](), list[int]()
        for i, ((number, row), token) in enumerate(zip(self._running.items(), drawn.flatten().tolist(), strict=True)):
            row.append(token)
            if row.ended:
                ended.append(number)
                row.keep(batch.state, i)
            new.append(NewToken(number, token, row.ended))
        self._leave(ended)
        return new

    def _draw(self, logits: Float[Tensor, "b v"], seen: Bool[Tensor, "b v"]) -> Int[Tensor, "b 1"]:
        found = list[Tensor]()
        for sampling, places, _ in self._groups:
            choose = probabilities if sampling.temperature else most_likely
            found.append(choose(logits[places], sampling, seen[places]))
        # no generator moves before all distributions are known to be good
        drawn = logits.new_empty(len(logits), 1, dtype=torch.long)
        for (sampling, places, generators), each in zip(self._groups, found, strict=True):
            if sampling.temperature:
                pairs = zip(each.split(1), generators, strict=True)
                each = torch.cat([torch.multinomial(shares, 1, generator=generator) for shares, generator in pairs])
            drawn[places] = each.reshape(-1, 1)
        return drawn


def generate_each(
    model: TokenModel, requests: Iterable[Request], *, size: int = 16, cache: PrefixCache | None = None
) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of each of the `requests`, from 0 on, with its new tokens, in the order in which they end.

    `model`, `size` and `cache` are those of a `ContinuousBatch`. A request is taken from the iterable when a row is
    free for it."""
    batch = ContinuousBatch(model, size=size, cache=cache)
    return _each(batch, iter(requests))


def _each(batch: ContinuousBatch, requests: Iterator[Request]) -> Iterator[tuple[int, list[int]]]:
    texts = dict[int, list[int]]()
    while True:
        while len(batch) < batch.size and (request := next(requests, None)) is not None:
            texts[batch.add(request)] = []
        if not batch:
            return
        for number, token, last in batch.step():
            texts[number].append(token)
            if last:
                yield number, texts.pop(number)


class _Group(NamedTuple):
    """Places in the batch whose tokens are drawn alike, each with its own generator."""

    sampling: Sampling
    places: Int[Tensor, " g"]
    generators: list[torch.Generator | None]
