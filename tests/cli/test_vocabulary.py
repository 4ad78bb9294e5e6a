"""Text to tokens and back, token by token."""

import json
from pathlib import Path

import numpy as np
import pytest

from linattn.cli.vocabulary import Bytes, Tokenizer, load_vocabulary
from linattn.console.errors import CommandError
from linattn.data.encoder import token_dtype

TEXT = "naïve café: 𝄞 … über\n\tend"


@pytest.fixture(params=["bytes", "tokenizer"])
def vocabulary(request, tokenizer):
    return Bytes() if request.param == "bytes" else Tokenizer(tokenizer)


def test_text_comes_back_piece_by_piece(vocabulary):
    decode = vocabulary.decoder()
    pieces = [decode(token) for token in vocabulary.encode(TEXT.encode())]
    assert "".join(pieces) + decode(None) == TEXT and decode(vocabulary.separator) == ""
    # a character appears when it is whole, and not only at the end
    assert not any("�" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > len(TEXT) // 4


def test_bytes_that_are_no_text_are_replaced():
    decode = Bytes().decoder()
    assert "".join(map(decode, b"a\xff\xc3b")) == "a\ufffd\ufffdb"
    assert decode(0xC3) + decode(256) == "\ufffd" == decode(0xC3) + decode(None)


def test_a_tokenizer_reads_what_is_no_text(tokenizer):
    vocabulary = Tokenizer(tokenizer)
    tokens = vocabulary.encode(b"the \xff cat")
    assert max(tokens) < vocabulary.separator
    assert "".join(map(vocabulary.decoder(), tokens)) == "the \ufffd cat"


def test_the_end_of_a_text_completes_it(tokenizer):
    """Also a text that ends within a character, so that all pieces together are what the tokenizer decodes."""
    vocabulary = Tokenizer(tokenizer)
    tokens = list(vocabulary.encode("a💡".encode()))[:-1]
    decode = vocabulary.decoder()
    assert "".join(map(decode, [*tokens, None])) == vocabulary.backend.decode(tokens)


def lost(vocabulary, text: str | bytes) -> int:
    text = text.encode() if isinstance(text, str) else text
    return vocabulary.lost(text, vocabulary.encode(text))


def test_what_gives_the_text_back_loses_nothing(vocabulary):
    assert lost(vocabulary, TEXT) == lost(vocabulary, "") == 0


@pytest.fixture
def of_words(tmp_path) -> Tokenizer:
    """Small letters of words that it knows; spaces between words are not its tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers

    backend = Backend(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, "über": 3}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "words.json"))
    return Tokenizer(tmp_path / "words.json")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("the cat", 0),
        ("The Cat", 2),
        ("Über", 2),  # Ü has two bytes
        ("the dog", 3),  # [UNK]
        ("the\ncat", 1),
        ("the 𝄞", 4),
    ],
)
def test_what_a_tokenizer_loses_is_counted(of_words, text, expected):
    assert lost(of_words, text) == expected


def test_bytes_that_are_no_text_are_lost_to_a_tokenizer(tokenizer):
    assert lost(Tokenizer(tokenizer), b"the \xff\xc3 cat") == 2
    assert lost(Bytes(), b"the \xff\xc3 cat") == 0


def test_the_separator_is_no_other_token(vocabulary):
    assert vocabulary.separator == vocabulary.size - 1
    assert vocabulary.separator not in vocabulary.encode(bytes(range(256)) + TEXT.encode())
    assert np.iinfo(vocabulary.dtype).max >= vocabulary.separator


def test_a_token_type_holds_every_token_and_no_more():
    assert [token_dtype(size) for size in (257, 65_536, 65_537)] == ["<u2", "<u2", "<u4"]


def test_large_vocabularies_take_larger_tokens(tokenizer, tmp_path):
    description = json.loads(tokenizer.read_text())
    description["model"]["vocab"] = description["model"]["vocab"] | {f"word{i}": 300 + i for i in range(70_000)}
    path = tmp_path / "large.json"
    path.write_text(json.dumps(description))
    assert Tokenizer(path).size == 70_301
    assert np.dtype(Tokenizer(path).dtype).itemsize == 4


def test_a_truncating_tokenizer_loses_nothing(tokenizer, tmp_path):
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(tokenizer))
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=1000)
    backend.save(str(tmp_path / "truncating.json"))
    expected = Tokenizer(tokenizer).encode(TEXT.encode())
    assert Tokenizer(tmp_path / "truncating.json").encode(TEXT.encode()) == expected


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]"])
def test_a_bad_tokenizer_is_an_error_in_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(CommandError, match=r"tokenizer\.json is no file of the tokenizers package: [^\n]+$"):
        load_vocabulary(path)


def test_a_missing_tokenizer_is_an_error():
    with pytest.raises(CommandError, match="there is no tokenizer nowhere"):
        load_vocabulary(Path("nowhere"))
