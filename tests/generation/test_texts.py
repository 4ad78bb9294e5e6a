"""Text in the place of tokens: whatever tokens a model draws, their text streams."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from linattn.generation import Sampling, generate, stream
from linattn.generation.texts import TextStream, text_decoder
from tests.models.causal import small_model


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer with a token per byte, "\\n" among them, and words: as those of Llama 2, Mistral and Gemma."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "<unk>": 258}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def pieces(tokenizer, tokens):
    return list(map(text_decoder(tokenizer, skip_special_tokens=False), [*tokens, None]))


def test_pieces_are_the_text(tokenizer):
    tokens = [256, *"\né𝄞\n".encode(), 257, 256, *"…".encode(), 258]
    text = [" a", "\n", "", "é", "", "", "", "𝄞", "\n", "b", " a", "", "", "…", "<unk>", ""]
    assert pieces(tokenizer, tokens) == text


@pytest.mark.parametrize("end", [[], [257], [256, 257]])
@pytest.mark.parametrize("wrong", [[0xE4], [0xC3, 0xC3], [0xFF, 0x0A], [0xE2, 0x82, 0x41]])
def test_bytes_that_are_no_text_end_no_text(tokenizer, wrong, end):
    """The tokenizer's own stream raises an error here: a wrong byte makes "�" of the right bytes before it, too."""
    text = "".join(pieces(tokenizer, [256, 0x0A, *wrong, *end]))
    assert text.startswith(" a\n�") and text.endswith(tokenizer.decode(end))


@pytest.mark.parametrize("run", ["�", "<s>"])
def test_long_runs_without_a_character_take_linear_time(tokenizer, run):
    """A decoder holds back wrong bytes and tokens without text, but does not read all of them again with each one."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens(["<s>"])
    lengths = []

    class Measured:
        def decode(self, tokens, *, skip_special_tokens):
            lengths.append(len(tokens))
            return own.decode(tokens, skip_special_tokens=skip_special_tokens)

    tokens = [257, *([0xFF if run == "�" else own.token_to_id(run)] * 500), 256, 257]
    decode = text_decoder(Measured(), skip_special_tokens=True)
    text = "".join(map(decode, [*tokens, None]))
    assert text == own.decode(tokens) == f"b{run.replace('<s>', '') * 500} ab"
    assert sum(lengths) < 20 * len(tokens)


def test_special_tokens_at_the_end_of_a_prompt_take_no_context(tokenizer):
    """The first token of a text may have no space, so its decoder forgets no text before special tokens."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.decoder = decoders.Metaspace()
    special = own.add_special_tokens(["<s>"]) and own.token_to_id("<s>")
    pieces = list(map(text_decoder(own, skip_special_tokens=True), [256, special, None, 256, None]))
    assert pieces == ["a", "", "", " a", ""]


def test_a_text_goes_on_with_the_space_that_its_prompt_ends_before(tmp_path):
    """Llama's tokenizers write no space before the first word of a text, and a new word is none."""
    vocabulary = {"<unk>": 0, "▁the": 1, "▁cat": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    model = small_model({"attention": "elu", "vocab_size": 3})
    model.tokenizer_file = tmp_path / "tokenizer.json"
    cat = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    options = {"max_new_tokens": 2, "sampling": Sampling(filter=lambda logits: cat.expand_as(logits))}
    assert generate(model, ["the", "the cat"], **options) == [" cat cat", " cat cat"]
    assert list(stream(model, "the", **options)) == [" cat", " cat"]


def test_the_end_of_a_prompt_is_no_new_text(tokenizer, tmp_path):
    """Where it looks like half a character, it would come with the first new one."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = small_model({"attention": "elu", "vocab_size": 259})
    model.tokenizer_file = tmp_path / "tokenizer.json"
    b = torch.nn.functional.one_hot(torch.tensor([257]), 259).double()
    options = {"max_new_tokens": 2, "sampling": Sampling(filter=lambda logits: b)}
    assert generate(model, "a�", **options) == "".join(stream(model, "a�", **options)) == "bb"


def test_the_rest_of_a_text_ends_before_the_stop_text_too():
    """A decoder may hold back more than the beginning of a stop text: all of it, with half a character after it."""
    stream = TextStream({1: "one E", 2: "", None: "ND two �"}.get, stops=["END"])
    assert "".join(stream.read([1, 2])) == "one " and stream.stopped
    stream = TextStream({1: "one E", 2: "", None: "N"}.get, stops=["END"])
    assert "".join(stream.read([1, 2])) == "one EN" and not stream.stopped
