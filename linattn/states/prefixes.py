"""States of the beginnings of texts, so that what texts have in common is read once: for many questions about one text,
for the turns of a conversation, and for going back in a text, where the state some tokens ago is that of a shorter
beginning."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from linattn.checks import check_sizes
from linattn.models.token_model import TokenModel, TokenModelState, require_causal
from linattn.nn.modes import evaluating
from linattn.states.compression import compress, restore
from linattn.states.rows import num_bytes

Text = Int[Tensor, "..."] | Sequence[int]


class Prefix(NamedTuple):
    """The longest beginning of some tokens that is in the cache: its length `num_tokens`, and its `state`, None if the
    length is 0."""

    num_tokens: int
    state: TokenModelState | None


class PrefixCache:
    """The states of `model` after beginnings of the texts that it reads: every `every` tokens, and at their ends.

    Together they have at most `budget` bytes. When there are more, those that were not used for the longest time go
    first, and of one text the longer beginnings before the shorter. With a `dtype` states are kept compressed, see
    `compress`. A change of the model's weights makes the states wrong: `clear` drops them."""

    def __init__(self, model: TokenModel, *, budget: int = 2**28, every: int = 1024, dtype: torch.dtype | None = None):
        require_causal(model, "a cache of prefixes")
        check_sizes(budget=budget, every=every)
        self.model, self.budget, self.every, self.dtype = model, budget, every, dtype
        self._states = OrderedDict[tuple[int, bytes], TokenModelState]()
        self.num_bytes = 0
        """The bytes of all states in the cache."""

    def __len__(self) -> int:
        return len(self._states)

    def clear(self) -> None:
        self._states.clear()
        self.num_bytes = 0

    def find(self, tokens: Text) -> Prefix:
        """Return the longest beginning of the `tokens`, (n) or (1, n), whose state is in the cache."""
        row = self._row(tokens)
        lengths = {length for length, _ in self._states if length <= len(row)}
        found = [key for key in self._keys(row, lengths) if key in self._states]
        for key in reversed(found):
            # the shortest last, so that it is the last to go
            self._states.move_to_end(key)
        if not found:
            return Prefix(0, None)
        return Prefix(found[-1][0], restore(self._states[found[-1]]))

    @torch.no_grad()
    def read(self, tokens: Text) -> TokenModelState:
        """Return the state after the `tokens`, (n) or (1, n), of which only those are read whose states are not in the
        cache; the new states enter it.

        Raises ValueError if there is no token, or if one is not of the vocabulary."""
        row = self._row(tokens)
        if not len(row):
            raise ValueError("a text of no tokens has no state: give extend the state None")
        start, state = self.find(row)
        ends = {*range(self.every * (start // self.every + 1), len(row), self.every), len(row)}
        keys = list(self._keys(row, ends))
        new = list[tuple[tuple[int, bytes], TokenModelState]]()
        for key in keys:
            if key[0] > start:
                with evaluating(self.model):
                    piece = row[start : key[0]].unsqueeze(0).to(self.model.device)
                    _, state = self.model.extend_hidden(piece, state)
                start = key[0]
                new.append((key, state))
        for key, each in reversed(new):
            self._put(key, each)
        assert state is not None
        return state

    def _put(self, key: tuple[int, bytes], state: TokenModelState) -> None:
        state = state if self.dtype is None else compress(state, self.dtype)
        self._states[key] = state
        self.num_bytes += num_bytes(state)
        while self.num_bytes > self.budget:
            self.num_bytes -= num_bytes(self._states.popitem(last=False)[1])

    def _keys(self, row: Tensor, lengths: set[int]) -> list[tuple[int, bytes]]:
        """Return the keys of the beginnings of these lengths, in ascending order: the length and the SHA-256 of the
        tokens."""
        digest, start, keys = hashlib.sha256(), 0, []
        for length in sorted(lengths):
            digest.update(row[start:length].numpy().tobytes())
            keys.append((length, digest.digest()))
            start = length
        return keys

    @staticmethod
    def _row(tokens: Text) -> Tensor:
        row = torch.as_tensor(tokens, dtype=None if len(tokens) else torch.long)
        if row.is_floating_point() or row.ndim not in (1, 2) or (row.ndim == 2 and len(row) != 1):
            raise ValueError(f"the tokens of one text are (n) or (1, n) whole numbers, but are {tuple(row.shape)}")
        return row.reshape(-1).to("cpu", torch.int64).contiguous()
