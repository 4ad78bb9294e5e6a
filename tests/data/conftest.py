"""The text and the tokenizer of the tests of the command line."""

from tests.cli.conftest import text, tokenizer

__all__ = ["text", "tokenizer"]
