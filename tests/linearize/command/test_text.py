"""The text of a conversion: special tokens, windows that reach all of it, packed documents."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import processors
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from linattn.console.errors import CommandError
from linattn.data import corpus
from linattn.data.corpus import Choice
from linattn.data.row import Piece, TokenRow
from linattn.linearize.calls import run
from linattn.linearize.command.text import (
    ModelEncoder,
    TrainingBatches,
    held_out_batches,
    load_tokenizer,
    read_tokens,
)
from linattn.nn.modes import evaluating

TEXTS = [f"the {'cat ' * (number % 5)}sees {number % 10}" for number in range(40)]
CONFIG = LlamaConfig(vocab_size=32)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Words as tokens, with special tokens by a template."""
    words = ["?", "<s>", "</s>", "the", "cat", "sees", *map(str, range(10))]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({x: i for i, x in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if template is not None:
        special = [("<s>", 1), ("</s>", 2)]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="?")


@pytest.mark.parametrize("template", [None, "<s> $0", "$0 </s>", "<s> $0 </s>"])
def test_documents_have_the_special_tokens_of_the_tokenizer(template, tmp_path):
    """Rows, and a file of text, which is one document."""
    own = tokenizer(template)
    rows, whole = tmp_path / "rows.jsonl", tmp_path / "whole.txt"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    whole.write_text("\n".join(TEXTS))
    tokens = read_tokens(Choice(paths=[str(rows)]), own, CONFIG, context=4)
    documents = [own(text)["input_ids"] for text in TEXTS]
    assert [*tokens.training[:], *tokens.held_out[:]] == [token for document in documents for token in document]
    assert tokens.training.document_starts(0, 20).tolist() == [
        start for start in np.cumsum([0, *map(len, documents)]).tolist() if start < 20
    ]
    choice = Choice(paths=[str(whole)], validation_paths=[str(rows)])
    assert read_tokens(choice, own, CONFIG, context=4).training[:].tolist() == own("\n".join(TEXTS))["input_ids"]


def test_data_are_tokenized_once_until_they_or_the_tokenizer_change(tmp_path, monkeypatch):
    path, calls = tmp_path / "a.txt", []
    path.write_text("the cat sees 1 " * 99)
    write = corpus.write_texts
    monkeypatch.setattr(corpus, "write_texts", lambda *given: calls.append(1) or write(*given))

    def read(template: str | None = None, context: int = 4) -> list[int]:
        return read_tokens(Choice(paths=[str(path)]), tokenizer(template), CONFIG, context=context).training[:].tolist()

    before = read()
    assert read() == before and len(calls) == 2
    with pytest.raises(CommandError, match="too short"):
        read(context=1000)
    assert len(calls) == 2
    assert read("<s> $0") == [1, *before] and len(calls) == 4
    path.write_text("the cat sees 2 " * 99)
    assert read() != before and len(calls) == 6


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "<|endoftext|>", "t", "h", "e", "th"]


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("gpt2", {"vocab.json": json.dumps({x: i for i, x in enumerate(WORDS)}), "merges.txt": "t h\nth e"}),
        ("bert", {"vocab.txt": "\n".join(WORDS)}),
    ],
)
def test_an_older_folder_has_a_tokenizer(kind, files, tmp_path):
    config = AutoConfig.for_model(kind, vocab_size=256)
    config.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), config) is None
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    found = load_tokenizer(str(tmp_path), config)
    assert found is not None
    assert found("the", add_special_tokens=False)["input_ids"] == [WORDS.index("the")]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused():
    with pytest.raises(CommandError, match="has a token 4, but the model has only 4 tokens"):
        ModelEncoder(tokenizer(None), 4).encode(b"the cat")


@pytest.mark.parametrize(("length", "count"), [(16, 9), (100, 9), (100, 2), (37, 1)])
def test_held_out_windows_do_not_overlap(length, count):
    batches = held_out_batches(np.arange(length), context=8, batch=3, count=count)
    rows = torch.cat([batch["input_ids"] for batch in batches])
    assert (rows.diff() == 1).all() and len(rows.unique()) == rows.numel()
    assert len(rows) == min(3 * count, length // 8)


def test_training_windows_reach_every_token_and_depend_on_the_seed_and_their_number():
    one, same, other = (TrainingBatches(np.arange(40), context=8, batch=4, seed=seed) for seed in (0, 0, 1))
    rows = torch.cat([one[i]["input_ids"] for i in range(50)])
    assert (rows.diff() == 1).all() and set(rows.flatten().tolist()) == set(range(40))
    assert torch.equal(same[7]["input_ids"], one[7]["input_ids"])
    assert not torch.equal(other[7]["input_ids"], one[7]["input_ids"])


@pytest.mark.parametrize("mask", [None, 31])
def test_two_batches_are_one_of_twice_the_size(mask):
    """Processes can divide a batch among them."""
    row = np.arange(99) % 31
    one = TrainingBatches(row, context=8, batch=4, seed=3, mask=mask)[1]
    halves = [TrainingBatches(row, context=8, batch=2, seed=3, mask=mask)[i] for i in (2, 3)]
    for name, whole in one.items():
        assert torch.equal(whole, torch.cat([half[name] for half in halves]))


def test_packed_documents_are_read_as_alone():
    torch.manual_seed(0)
    lengths = [5, 9, 1, 12]
    edges = np.cumsum([0, *lengths])
    tokens = np.random.default_rng(0).integers(0, 32, edges[-1])
    (batch,) = held_out_batches(TokenRow([Piece(tokens, edges)]), context=27, batch=1, count=1, packed=True)
    assert batch["position_ids"][0].tolist() == [place for length in lengths for place in range(length)]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    with evaluating(model), torch.no_grad():
        alone = [run(model, {"input_ids": part[None]}).logits for part in batch["input_ids"][0].split(lengths)]
        torch.testing.assert_close(run(model, batch).logits, torch.cat(alone, 1), rtol=1e-5, atol=1e-6)
    (single,) = held_out_batches(TokenRow([Piece(tokens, edges[[0, -1]])]), context=27, batch=1, count=1, packed=True)
    assert single.keys() == {"input_ids"}


def test_a_file_of_bytes_needs_no_tokenizer(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    tokens = read_tokens(Choice(paths=[str(tmp_path)]), None, LlamaConfig(vocab_size=256), context=4)
    assert [*tokens.training[:], *tokens.held_out[:]] == list(range(100))
    assert len(tokens.held_out) == 5
