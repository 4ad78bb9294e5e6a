"""The interface of a tokenizer that the reader of data needs."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Encoder(Protocol):
    """Makes tokens of text. `begin` and `end` are the tokens around each document. `dtype` is numpy's name of a type
    that holds every token."""

    @property
    def begin(self) -> Sequence[int]: ...

    @property
    def end(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> str: ...

    def encode(self, text: bytes) -> Sequence[int]:
        """Return the tokens of a text, or of a piece of one, without `begin` and `end`."""
        ...

    def encode_each(self, texts: Sequence[bytes]) -> Sequence[Sequence[int]]:
        """Return the tokens of each text; several texts at once may take less time."""
        ...

    def lost(self, text: bytes, tokens: Sequence[int]) -> int:
        """Return a lower bound on the number of bytes of the text that cannot be restored from its tokens."""
        ...


def token_dtype(size: int) -> str:
    """Return the smallest numpy type for the tokens of a vocabulary of this `size`, little-endian on every machine."""
    return "<u2" if size <= 1 << 16 else "<u4"
