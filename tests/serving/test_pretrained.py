"""`linattn serve` on folders that transformers loads: each client gets what transformers' own `generate` writes."""

import argparse

import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM, RwkvConfig, RwkvForCausalLM

from linattn import LanguageModel, LanguageModelConfig
from linattn.cli.main import main
from linattn.cli.pretrained import load, load_for_requests
from linattn.integrations.transformers import byte_tokenizer
from linattn.linearize import convert, plan
from tests.serving.conftest import running

SIZE = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 256}
LLAMA = {**SIZE, "intermediate_size": 48, "num_attention_heads": 2, "max_position_embeddings": 256}
TEMPLATE = "{% for each in messages %}[{{ each.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
PROMPTS = ["the cat", "a", "över the sea and far away"]
FOLDERS = ("softmax", "linearized", "mamba2", "own")


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path):
    torch.manual_seed(0)
    path = tmp_path / request.param
    if request.param == "own":
        LanguageModel(LanguageModelConfig(vocab_size=257, dim=16, depth=1, num_heads=2)).save(path)
    elif request.param == "mamba2":
        options = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16}
        Mamba2ForCausalLM(Mamba2Config(**SIZE, **options)).save_pretrained(path)
    else:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
        if request.param == "linearized":
            convert(model, plan(model, method="local+elu", window=3, keep=(1,)))
        model.save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def test_texts_are_those_of_transformers(folder):
    stock, tokenizer = load(folder), byte_tokenizer()

    def expected(tokens):
        tokens = torch.tensor([tokens])
        new = stock.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
        return tokenizer.decode(new[0, tokens.shape[1] :], skip_special_tokens=True)

    model, vocabulary = load_for_requests(folder, argparse.Namespace(cpu=True))
    case = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    with running(model, vocabulary, chat=vocabulary.chat) as server:
        answer = server.client.completions.create(prompt=PROMPTS, **case)
        assert [choice.text for choice in answer.choices] == [expected(tokenizer(text).input_ids) for text in PROMPTS]
        # the state after the first 16 tokens is in the cache
        again = server.client.completions.create(prompt=PROMPTS[2], **case)
        assert again.choices[0].text == answer.choices[2].text
        messages = [{"role": "user", "content": "the cat"}]
        chat = server.client.chat.completions.create(messages=messages, **case)
        assert chat.choices[0].message.content == expected(list(b"[the cat]>"))


def test_a_folder_without_a_tokenizer_has_bytes(tmp_path):
    LanguageModel(LanguageModelConfig(vocab_size=257, dim=16, depth=1, num_heads=2)).save(tmp_path)
    model, vocabulary = load_for_requests(tmp_path, argparse.Namespace(cpu=True))
    assert not vocabulary.has_chat_template
    with running(model, vocabulary) as server:
        assert server.client.completions.create(model="tiny", prompt="é", max_tokens=2).usage.prompt_tokens == 2
        with pytest.raises(openai.BadRequestError, match="give a prompt"):
            server.client.completions.create(model="tiny", prompt="", max_tokens=2)


def test_a_model_that_cannot_be_served_is_named(tmp_path, capsys):
    sizes = {"vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 2}
    RwkvForCausalLM(RwkvConfig(**sizes)).save_pretrained(tmp_path / "rwkv")
    assert main(["serve", str(tmp_path / "rwkv"), "--cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the rows of RwkvForCausalLM cannot be joined: its cache is a NoneType" in line


@pytest.mark.parametrize("folder", ["softmax", "own"], indirect=True)
def test_a_template_with_an_error_ends_what_needs_it_alone(folder, tmp_path, capsys):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users') }}")
    (tmp_path / "text").write_text("the cat")
    assert main(["read", str(folder), str(tmp_path / "text"), "--out", str(tmp_path / "state"), "--cpu"]) == 0
    capsys.readouterr()
    assert main(["serve", str(folder), "--host", "no host", "--cpu"]) == 2
    assert capsys.readouterr().err == f"linattn serve: the chat template of {folder} cannot be used: no users\n"
