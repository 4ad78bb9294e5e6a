"""States of the beginnings of texts, so that what texts have in common is read once: for many questions about one text,
for the turns of a conversation, and for going back in a text, where the state some tokens ago is that of a shorter
beginning."""

import hashlib
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from linattn.checks import check_instances, check_sizes, check_types
from linattn.models.token_model import TokenModel, TokenModelState
from linattn.nn.modes import evaluating
from linattn.ops.nested import batch_size, checked_kind
from linattn.states.compression import check_compact, compress, restore
from linattn.states.file import digest_state
from linattn.states.folder import Key, StateFolder
from linattn.states.requirements import require_causal
from linattn.states.rows import num_bytes, to, whole_numbers

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
    `compress`. With a `folder` they are also in files there, of at most `folder_budget` bytes together, where other
    processes with the same model find them, and this one after a restart.

    A change of the model's weights makes the states wrong: `clear` drops them."""

    @check_types
    def __init__(
        self,
        model: TokenModel,
        *,
        budget: int = 2**28,
        every: int = 1024,
        dtype: torch.dtype | None = None,
        folder: str | os.PathLike[str] | None = None,
        folder_budget: int = 2**32,
    ):
        require_causal(model, "a cache of prefixes")
        check_sizes(budget=budget, every=every, folder_budget=folder_budget)
        if dtype is not None:
            check_compact(dtype)
        self.model, self.budget, self.every, self.dtype = model, budget, every, dtype
        self.folder, self.folder_budget = folder, folder_budget
        self._past: tuple[TokenModelState | None, str] = None, ""
        self.clear()

    def __len__(self) -> int:
        return len(self._states)

    def clear(self) -> None:
        """Drop all states in memory. Files in the folder stay, but only a model with the weights that made them finds
        them."""
        self._states = OrderedDict[Key, TokenModelState]()
        self.num_bytes = 0
        """The bytes of all states in memory."""
        self._files = None
        if self.folder is not None:
            self._files = StateFolder(self.folder, self.model, str(self.dtype), budget=self.folder_budget)

    def find(self, tokens: Text, state: TokenModelState | None = None) -> Prefix:
        """Return the longest beginning of the `tokens`, (n) or (1, n), whose state is in the cache. `state` is as in
        `read`."""
        row = self._row(tokens)
        files = set[Key]() if self._files is None else self._files.keys()
        lengths = {length for length, _ in (*self._states, *files) if length <= len(row)}
        found = [key for key in self._keys(row, lengths, state) if key in self._states or key in files]
        for key in reversed(found):
            # the shortest last, so that it is the last to go
            self._touch(key)
        for key in reversed(found):
            if (known := self._load(key)) is not None:
                return Prefix(key[0], restore(known))
        return Prefix(0, None)

    @torch.no_grad()
    def read(self, tokens: Text, state: TokenModelState | None = None) -> TokenModelState:
        """Return the state after the `tokens`, (n) or (1, n). The model reads only those after the longest beginning in
        the cache, and the new states enter the cache. `state` is the past before the tokens, such as a decoder's
        context; texts after different pasts share no states.

        Raises ValueError if there is no token, or if one is not of the vocabulary."""
        row = self._row(tokens)
        if not len(row):
            raise ValueError("a text of no tokens has no state: give extend the state None")
        start, known = self.find(row, state)
        ends = {*range(self.every * (start // self.every + 1), len(row), self.every), len(row)}
        past, state = state, known if start else state
        new = dict[int, TokenModelState]()
        for end in sorted(end for end in ends if end > start):
            with evaluating(self.model):
                piece = row[start:end].unsqueeze(0).to(self.model.device)
                _, state = self.model.extend_hidden(piece, state)
            start, new[end] = end, state
        self.put(row, new, past)
        assert state is not None
        return state

    def put(self, tokens: Text, new: Mapping[int, TokenModelState], state: TokenModelState | None = None) -> None:
        """Add states that were made elsewhere. `new` maps a number of tokens to the state after so many of the
        `tokens`, (n) or (1, n); `state` is the past before all of them.

        Raises ValueError for a number of tokens below 1 or above n, and for a state of several rows. If a file cannot
        be written, such as to a full disk, a warning says so, and the states are in memory alone."""
        row = self._row(tokens)
        check_instances(Mapping, new=new)
        if whole_numbers(list(new)) is None:
            raise ValueError(f"new must have a state per number of tokens, but its keys are {list(new)!r:.60}")
        if wrong := [length for length in new if not 0 < length <= len(row)]:
            raise ValueError(
                f"states must be after 1 to {len(row)} tokens, as many as there are, but one is of {wrong[0]}"
            )
        for each in new.values():
            if (rows := batch_size(checked_kind(each, TokenModelState))) not in (1, None):
                raise ValueError(f"the state of a text is of one row, but one that was given is of {rows}")
        unknown = [key for key in self._keys(row, set(new), state) if key not in self._states]
        for key in reversed(unknown):
            each = new[key[0]] if self.dtype is None else compress(new[key[0]], self.dtype)
            self._put(key, each)
            if self._files is not None:
                try:
                    self._files.save(key, each)
                except OSError as error:
                    warnings.warn(f"a state is kept in memory alone: {error}", stacklevel=2)
        if self._files is not None and unknown:
            self._files.trim()

    def _touch(self, key: Key) -> None:
        if key in self._states:
            self._states.move_to_end(key)
        if self._files is not None:
            self._files.touch(key)

    def _load(self, key: Key) -> TokenModelState | None:
        """Return a state from memory, or from its file, after which it is in memory."""
        state = self._states.get(key)
        if state is None and self._files is not None:
            state = self._files.load(key)
            if state is not None:
                state = to(state, device=self.model.device)
                self._put(key, state)
        return state

    def _put(self, key: Key, state: TokenModelState) -> None:
        self._states[key] = state
        self.num_bytes += num_bytes(state)
        while self.num_bytes > self.budget:
            self.num_bytes -= num_bytes(self._states.popitem(last=False)[1])

    def _keys(self, row: Int[Tensor, " n"], lengths: set[int], state: TokenModelState | None) -> list[Key]:
        """Return the keys of the beginnings of these lengths after `state`, in ascending order: the length, and the
        SHA-256 of the state and the tokens."""
        state = None if state is None else checked_kind(state, TokenModelState)
        if state is not self._past[0]:
            # the same state often comes again, and its digest takes longer than that of the tokens
            self._past = state, "" if state is None else digest_state(state)
        digest, start, keys = hashlib.sha256(self._past[1].encode()), 0, list[Key]()
        for length in sorted(lengths):
            digest.update(row[start:length].numpy().tobytes())
            keys.append((length, digest.hexdigest()))
            start = length
        return keys

    @staticmethod
    def _row(tokens: Text) -> Tensor:
        row = whole_numbers(tokens)
        if row is None or row.ndim not in (1, 2) or (row.ndim == 2 and len(row) != 1):
            came = tuple(tokens.shape) if isinstance(tokens, Tensor) else repr(tokens)
            raise ValueError(f"the tokens of one text are (n) or (1, n) whole numbers, but are {came}")
        return row.reshape(-1).cpu().contiguous()
