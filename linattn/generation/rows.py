"""The rows of a continuous batch: single ones, whose texts are read, and groups that share each call of the model."""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linattn.generation.decoding import Sampler
from linattn.generation.sampling import Sampling, most_likely, probabilities
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.ops.nested import map_state
from linattn.states import PrefixCache, concatenate, select


class Row:
    """The request with the number `request` in a batch, with its `text`, the prompt and the new tokens. `state` is the
    state after the first `num_tokens` of them, which `past` precedes, as the request has it. The last token of the text
    is always left to the batch's next step. Once the row is part of a group, `state` is None."""

    def __init__(
        self, request: int, sampler: Sampler, start: TokenModelState, past: Any, cache: PrefixCache | None
    ) -> None:
        self.request, self.sampler, self.cache, self.start, self.past = request, sampler, cache, start, past
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
            self.num_tokens, state = self.cache.find(self.text[:-1], self.past)
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
            self.cache.put(self.text, self.states, self.past)
            self.states.clear()

    def append(self, token: int) -> None:
        self.text.append(token)
        self.num_new += 1

    def keep(self, state: TokenModelState, place: int) -> None:
        """Let the cache keep the state after all tokens but the last, which no call has read."""
        if self.cache is not None:
            text = self.text[:-1]
            self.cache.put(text, {len(text): _ordinary(select(state, [place]))}, self.past)


class GroupState(NamedTuple):
    """The last `tokens` of a group's rows. Without `logits`, `state` is the state before these tokens, which the next
    call reads; then `logits` and `state` are those after them. `seen` marks the tokens of each row's text. The rows are
    the first dimension of all tensors, so that `select` and `concatenate` take this tuple."""

    state: TokenModelState
    seen: Bool[Tensor, "b v"]
    tokens: Int[Tensor, "b 1"]
    logits: Float[Tensor, "b v"] | None


class RowGroup:
    """Rows that share each call of the model. After an error of the model there is no `state`."""

    def __init__(self, model: TokenModel, rows: list[Row], state: GroupState) -> None:
        self.model, self.rows, self.state = model, rows, state
        # a filter sees one row, as it would alone
        alike = dict[Any, list[int]]()
        for place, row in enumerate(rows):
            sampling = row.sampler.sampling
            alike.setdefault(sampling if sampling.filter is None else place, []).append(place)
        self._draws = [
            _Draw(
                rows[places[0]].sampler.sampling,
                torch.tensor(places, device=model.device),
                [rows[i].generator for i in places],
            )
            for places in alike.values()
        ]

    @classmethod
    def of_row(cls, model: TokenModel, row: Row) -> "RowGroup":
        """Return the group of a row alone, whose text is read but for its last token."""
        assert row.state is not None and not row.unread
        tokens = torch.tensor([row.text], device=model.device)
        seen = torch.zeros(1, model.vocab_size, dtype=torch.bool, device=model.device)
        # a copy, as groups write to their states, and this one may be the caller's, or the cache's
        state, row.state = map_state(torch.clone, row.state), None
        return cls(model, [row], GroupState(state, seen.scatter_(1, tokens, True), tokens[:, -1:], None))

    @classmethod
    def joined(cls, groups: Sequence["RowGroup"]) -> "RowGroup":
        """Return one group of the rows of all, which have no states any more: layer after layer, they are moved."""
        if len(groups) == 1:
            return groups[0]
        states, rows = [group.state for group in groups], [row for group in groups for row in group.rows]
        for group in groups:
            del group.state
        stacks = [deque(state.state.stack) for state in states]
        states = [state._replace(state=state.state._replace(stack=())) for state in states]
        # beside the tokens, as a layer may have no state
        tokens = [state.tokens for state in states]
        layers = ([each.popleft() for each in stacks] for _ in range(len(stacks[0])))
        stack = tuple(concatenate(list(zip(tokens, layer, strict=True)))[1] for layer in layers)
        joined = concatenate(states)
        return cls(groups[0].model, rows, joined._replace(state=joined.state._replace(stack=stack)))

    def without(self, requests: Collection[int]) -> "RowGroup":
        """Return the group without these rows."""
        places = [i for i, row in enumerate(self.rows) if row.request not in requests]
        if len(places) == len(self.rows):
            return self
        return RowGroup(self.model, [self.rows[i] for i in places], select(self.state, places))

    def extend(self) -> None:
        """Read the next token of each row. The new states take the memory of those before it, one layer after
        another."""
        state, seen, tokens, _ = self.state
        # after an error some layers have read the token
        del self.state
        x, state = self.model.extend_hidden(tokens, state._replace(stack=_Overwritten(state.stack)))
        self.state = GroupState(state, seen, tokens, self.model.logits(x[:, -1]))

    def undrawable(self) -> list[int]:
        """Return the requests whose logits are such that no token can be drawn."""
        assert self.state.logits is not None
        good = self.state.logits.amax(-1).isfinite().tolist()
        return [row.request for row, each in zip(self.rows, good, strict=True) if not each]

    def distributions(self) -> list[Tensor]:
        """Return what the next tokens are drawn from, for each way of drawing: their probabilities, or the most likely
        ones."""
        assert self.state.logits is not None
        logits, seen = self.state.logits, self.state.seen
        return [
            (probabilities if sampling.temperature else most_likely)(logits[places], sampling, seen[places])
            for sampling, places, _ in self._draws
        ]

    def draw(self, distributions: list[Tensor]) -> list[int]:
        """Append to each row its next token, and return these tokens."""
        drawn = torch.empty_like(self.state.tokens)
        for (sampling, places, generators), each in zip(self._draws, distributions, strict=True):
            if sampling.temperature:
                pairs = zip(each.split(1), generators, strict=True)
                each = torch.cat([torch.multinomial(shares, 1, generator=generator) for shares, generator in pairs])
            drawn[places] = each.reshape(-1, 1)
        state, seen, *_ = self.state
        self.state, new = GroupState(state, seen.scatter_(1, drawn, True), drawn, None), drawn.flatten().tolist()
        for place, (row, token) in enumerate(zip(self.rows, new, strict=True)):
            row.append(token)
            if row.ended:
                row.keep(state, place)
        return new


class _Overwritten(deque[Any]):
    """The states of layers. The state that is appended takes the memory of the one that was taken before. New tensors
    for every token would leave gaps, as an allocator seldom puts a tensor into the gap of one with its size."""

    def popleft(self) -> Any:
        self._old = super().popleft()
        return self._old

    def append(self, state: Any) -> None:
        super().append(_overwrite(self._old, state))


def _overwrite(old: Any, new: Any) -> Any:
    """Write a state over an older one, but for tensors of another size, or in the memory of the older one."""
    if isinstance(new, Tensor):
        fits = isinstance(old, Tensor) and old.shape == new.shape and old.dtype == new.dtype
        return old.copy_(new) if fits and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr() else new
    if isinstance(new, tuple):
        parts = [_overwrite(*each) for each in zip(old, new, strict=True)]
        return type(new)(*parts) if hasattr(new, "_fields") else tuple(parts)
    return new


class _Draw(NamedTuple):
    """The rows of a group, by their numbers in it, whose tokens are drawn with the same `sampling`, in one call. Each
    row has its own generator of random numbers."""

    sampling: Sampling
    places: Int[Tensor, " g"]
    generators: list[torch.Generator | None]


def _ordinary(state: TokenModelState) -> TokenModelState:
    """Return the state with copies of tensors that inference mode has made: unlike these, copies can be used in
    training, as all states in a cache can."""
    with torch.inference_mode(False):
        return map_state(torch.clone, state)
