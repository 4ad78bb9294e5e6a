"""Vocabularies: tokens are bytes, or entries of a `tokenizers` file.

The last token, `separator`, begins every document and has no text. `lost` returns a lower bound on the number of bytes
that cannot be restored from the tokens."""

import codecs
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import final

from linattn.console.errors import CommandError, explained
from linattn.data.encoder import token_dtype
from linattn.generation.texts import Decoder, text_decoder
from linattn.models.storage import SEPARATOR


class SeparatedVocabulary(ABC):
    """A vocabulary of documents that begin and end with the token `separator`."""

    separator: int

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (self.separator,)

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that begins a document."""
        tokens = list(self.encode(text.encode()))
        return tokens if tokens[:1] == [self.separator] else [self.separator, *tokens]

    @abstractmethod
    def encode(self, text: bytes) -> Sequence[int]:
        """Return the tokens of a text."""


@final
class Bytes(SeparatedVocabulary):
    """Bytes as tokens, for any file. Invalid UTF-8 is decoded as U+FFFD."""

    name, size, separator, dtype = "bytes", 257, 256, "<u2"
    begin, end = (256,), ()

    def encode(self, text: bytes) -> Sequence[int]:
        # numpy would read bytes as one string, but reads a memoryview of them as numbers
        return memoryview(text)

    def encode_each(self, texts: Sequence[bytes]) -> Sequence[Sequence[int]]:
        return [self.encode(text) for text in texts]

    def lost(self, text: bytes, tokens: Sequence[int]) -> int:
        return 0

    def decoder(self) -> Decoder:
        # a character of several bytes appears with its last one
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ends = (self.separator, None)
        return lambda token: decoder.decode(b"" if token in ends else bytes([token]), final=token in ends)


@final
class Tokenizer(SeparatedVocabulary):
    """A file of the `tokenizers` package. Invalid UTF-8 is read as U+FFFD."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        if not path.is_file():
            raise CommandError(f"there is no tokenizer {path}")
        # the package raises no narrower class
        with explained(f"{path} is no file of the tokenizers package", Exception):
            self.backend = Backend.from_file(str(path))
        # truncation and padding are settings of a batch, not of a text
        self.backend.no_truncation()
        self.backend.no_padding()
        last = max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        # the tokenizer of a run has the separator as its last token; to another, one token is added
        self.separator = last + (self.backend.token_to_id(SEPARATOR) != last)
        self.name, self.size, self.dtype = path.name, self.separator + 1, token_dtype(self.separator + 1)
        self.begin, self.end = (self.separator,), ()

    def encode(self, text: bytes) -> Sequence[int]:
        return self.backend.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids

    def encode_each(self, texts: Sequence[bytes]) -> Sequence[Sequence[int]]:
        decoded = [text.decode("utf-8", "replace") for text in texts]
        return [encoding.ids for encoding in self.backend.encode_batch(decoded, add_special_tokens=False)]

    def lost(self, text: bytes, tokens: Sequence[int]) -> int:
        """Count the bytes of the characters of `text` that the decoded tokens lack. The order of the characters does
        not matter."""
        # surrogateescape makes each invalid byte a character of its own, which no tokenizer gives back
        original = text.decode("utf-8", "surrogateescape")
        decoded = self.backend.decode(list(tokens), skip_special_tokens=False)
        if decoded == original:
            return 0
        missing = Counter(original) - Counter(decoded)
        return sum(count * len(each.encode("utf-8", "surrogateescape")) for each, count in missing.items())

    def decoder(self) -> Decoder:
        decode = text_decoder(self.backend, skip_special_tokens=False)
        return lambda token: "" if token == self.separator else decode(token)


Vocabulary = Bytes | Tokenizer


def load_vocabulary(tokenizer: str | Path | None) -> Vocabulary:
    return Bytes() if tokenizer is None else Tokenizer(Path(tokenizer))
