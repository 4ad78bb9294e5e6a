"""Text in the place of tokens, for models that have a tokenizer."""

from collections.abc import Sequence
from typing import Any

from linattn.checks import extra
from linattn.models.storage import SEPARATOR
from linattn.models.token_model import TokenModel


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
        separator = self.tokenizer.token_to_id(SEPARATOR)
        self.stop_tokens = () if separator is None else (separator,)

    def encode(self, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
        """Return the tokens of each text; with `begins`, after the token that begins a document."""
        return [self.tokenizer.encode(text, add_special_tokens=begins).ids for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
