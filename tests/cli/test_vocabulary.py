"""Text to tokens and back, token by token."""

import json
from pathlib import Path

import numpy as np
import pytest

from linattn.cli.errors import CommandError
from linattn.cli.vocabulary import Bytes, Tokenizer, load_vocabulary

TEXT = "naïve café: 𝄞 … über\n\tend"


@pytest.fixture(params=["bytes", "tokenizer"])
def vocabulary(request, tokenizer):
    return Bytes() if request.param == "bytes" else Tokenizer(tokenizer)


def test_text_comes_back_piece_by_piece(vocabulary):
    decode = vocabulary.decoder()
    pieces = [decode(token) for token in vocabulary.encode(TEXT.encode())]
    assert "".join(pieces) + decode(vocabulary.separator) == TEXT
    # a character appears when it is whole, and not only at the end
    assert not any("�" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > len(TEXT) // 4


def test_bytes_that_are_no_text_are_replaced():
    decode = Bytes().decoder()
    assert "".join(map(decode, b"a\xff\xc3b")) == "a\ufffd\ufffdb"
    assert decode(0xC3) + decode(256) == "\ufffd"


def test_a_tokenizer_reads_what_is_no_text(tokenizer):
    vocabulary = Tokenizer(tokenizer)
    tokens = vocabulary.encode(b"the \xff cat")
    assert max(tokens) < vocabulary.separator
    assert "".join(map(vocabulary.decoder(), tokens)) == "the \ufffd cat"


def test_the_separator_is_no_other_token(vocabulary):
    assert vocabulary.separator == vocabulary.size - 1
    assert vocabulary.separator not in vocabulary.encode(bytes(range(256)) + TEXT.encode())
    assert np.iinfo(vocabulary.dtype).max >= vocabulary.separator


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
