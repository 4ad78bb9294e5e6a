"""Text in the place of tokens, for models that have a tokenizer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from linattn.checks import extra
from linattn.models.storage import SEPARATOR
from linattn.models.token_model import TokenModel

Decoder = Callable[[int | None], str]
"""Takes each next token of a text and returns the piece of text that it completes; for None, it returns the rest."""

_LAST = 7
"""A number of tokens that is larger than that of the bytes of a character."""


def is_text(prompts: object) -> bool:
    """Return whether the prompts are a string or a list of strings."""
    if isinstance(prompts, Sequence) and not isinstance(prompts, str):
        return bool(prompts) and all(isinstance(prompt, str) for prompt in prompts)
    return isinstance(prompts, str)


class TextCoder:
    """The tokenizer of a model. The token that begins the next document, if there is one, is in `stop_tokens`."""

    def __init__(self, model: TokenModel):
        if model.tokenizer_file is None:
            raise ValueError(
                "the prompts are text, but the model has no tokenizer: LanguageModel.load finds the tokenizer.json of "
                "a folder, or set model.tokenizer_file, or give tokens, such as list(b'To be') for a model of bytes"
            )
        with extra("cli"):
            from tokenizers import Tokenizer
        self.tokenizer: Any = Tokenizer.from_file(str(model.tokenizer_file))
        # truncation and padding are settings of a batch, not of a text
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        separator = self.tokenizer.token_to_id(SEPARATOR)
        self.stop_tokens = () if separator is None else (separator,)

    def encode(self, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
        """Return the tokens of each text; with `begins`, after the token that begins a document."""
        return [self.tokenizer.encode(text, add_special_tokens=begins).ids for text in texts]

    def decode(self, tokens: Sequence[int], prompt: Sequence[int]) -> str:
        return "".join(map(self.decoder(prompt), [*tokens, None]))

    def decoder(self, prompt: Sequence[int]) -> Decoder:
        """Return a decoder for the tokens after those of the `prompt`. Many tokenizers write no space before the first
        token of a text, so the prompt is decoded first."""
        decode = text_decoder(self.tokenizer, skip_special_tokens=True)
        # the end, as no character of a text is half there
        for token in (*prompt, None):
            decode(token)
        return decode


def text_decoder(tokenizer: Any, *, skip_special_tokens: bool) -> Decoder:
    """Return a decoder for a text in the tokens of `tokenizer`, one of the tokenizers package. All pieces together are
    what the tokenizer's own `decode` returns for the whole text. Only bytes that are no text differ: they may make "�"
    of the right bytes before them, whose piece is complete."""
    tokens, count, context = list[int](), 0, ""

    def decoded(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def is_open(text: str) -> bool:
        # "�" may be half a character
        return not text or text.endswith("�")

    def decode(token: int | None) -> str:
        nonlocal tokens, count, context
        if token is None and len(tokens) == count:
            return ""
        tokens += [] if token is None else [token]
        # the last tokens suffice to see it, and a long run of wrong bytes is not read again with each token
        if token is not None and len(tokens) - count > _LAST and is_open(decoded(tokens[-_LAST:])):
            return ""
        text = decoded(tokens)
        if token is not None and is_open(text[len(context) :]):
            return ""
        piece = text[len(context) :]
        # a token's text depends on those before it: the `count` tokens of each piece are the context of the next one
        tokens = tokens[count:] if piece else tokens
        count, context = len(tokens), decoded(tokens)
        return piece

    return decode


class TextStream:
    """The text of new tokens, in pieces that no later token changes. It ends before the first of the texts `stops` that
    is generated; `stopped` is then True.

    The decoder `decode` takes the tokens of the prompt first, whose text is `prompt`, because what a token means may
    depend on those before it. None after them says that the prompt ends with a complete character."""

    def __init__(
        self, decode: Callable[[Any], str], prompt: Iterable[int | None] = (), *, stops: Sequence[str] = ()
    ) -> None:
        self._decode, self._stops = decode, stops
        self._held, self.stopped = "", False
        self.prompt = "".join(map(decode, prompt))

    def extend(self, token: Any) -> str:
        text = self._held + self._decode(token)
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(places)
        # the end of the text may be the beginning of a stop text
        size = min(places) if places else len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[size:]
        return text[:size]

    def read(self, tokens: Iterable[Any]) -> Iterator[str]:
        """Yield the text of all the tokens, up to a stop text."""
        for token in tokens:
            yield self.extend(token)
            if self.stopped:
                return
        yield self.finish()

    def finish(self) -> str:
        """Return the rest of the text, for which no more tokens come."""
        text = "" if self.stopped else self.extend(None)
        return text if self.stopped else text + self._held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
