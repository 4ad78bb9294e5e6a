"""`linattn generate` and `linattn info` on folders that transformers loads."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from linattn import LanguageModel, LanguageModelConfig, states
from linattn.cli.main import main
from linattn.integrations.transformers import byte_tokenizer
from linattn.linearize import convert, load_linearized, plan

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
GREEDY = ("--temperature", "0", "--max-new-tokens", "8", "--prompt", "the cat")
TEMPLATE = "{% for each in messages %}[{{ each.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """A linearized Llama of bytes, one of whose layers is still softmax, with a tokenizer and a chat template."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("folders") / "linear"
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=256, eos_token_id=None, **SIZE))
    convert(model, plan(model, method="local+elu", window=3, keep=(1,)))
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def output(capsys, command, folder, *options):
    capsys.readouterr()
    assert main([command, str(folder), *options]) == 0
    return capsys.readouterr().out


def greedy(folder, text, **options):
    model, tokenizer = load_linearized(folder), AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text, return_tensors="pt", **options)["input_ids"]
    new = model.generate(tokens, max_new_tokens=8, do_sample=False)[0]
    return tokenizer.decode(new, skip_special_tokens=True)


def test_the_text_is_that_of_transformers(linear, capsys):
    assert output(capsys, "generate", linear, *GREEDY) == greedy(linear, "the cat") + "\n"


def test_no_new_tokens_are_the_prompt_alone(linear, finished, capsys):
    for folder in (linear, finished):
        assert main(["generate", str(folder), "--prompt", "the cat", "--max-new-tokens", "0"]) == 0
        assert capsys.readouterr() == ("the cat\n", "[0 tokens]\n")


def test_a_chat_prints_the_answer(linear, capsys):
    expected = greedy(linear, "[the cat]>", add_special_tokens=False).removeprefix("[the cat]>")
    assert output(capsys, "generate", linear, *GREEDY, "--chat").strip("\n") == expected.strip("\n")


def test_a_seed_writes_the_same_and_stop_ends_the_text(linear, capsys):
    seeded = ("--max-new-tokens", "12", "--prompt", "the cat", "--seed", "3", "--top-k", "40")
    text = output(capsys, "generate", linear, *seeded)
    assert text == output(capsys, "generate", linear, *seeded)
    stop = text.removeprefix("the cat")[3]
    stopped = output(capsys, "generate", linear, *seeded, "--stop", stop)
    assert stopped == "the cat" + text.removeprefix("the cat").partition(stop)[0] + "\n"
    # but not one in the prompt
    assert output(capsys, "generate", linear, *seeded, "--stop", "the").startswith("the cat" + text[len("the cat")])


def test_a_text_that_was_read_goes_on(linear, finished, tmp_path, capsys):
    """From a file, with one prompt or several, as if it were read with the prompt. A run refuses the file."""
    text, state, prompts, out = (tmp_path / name for name in ("a.txt", "a.state", "prompts.jsonl", "out.jsonl"))
    text.write_text("the cat sat on the mat")
    assert main(["read", str(linear), str(text), "--out", str(state)]) == 0
    assert "23 tokens" in capsys.readouterr().out
    whole = greedy(linear, "the cat sat on the mat and")
    answer = whole.removeprefix("the cat sat on the mat")
    after = ("--state", str(state), *GREEDY[:-1])
    assert output(capsys, "generate", linear, *after, " and") == answer + "\n"
    prompts.write_text(json.dumps({"prompt": " and"}) + "\n" + json.dumps({"prompt": " or"}))
    output(capsys, "generate", linear, *after[:-1], "--prompts", str(prompts), "--out", str(out))
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["text"] == answer.removeprefix(" and") and second["tokens"] == 8
    assert main(["generate", str(finished), *after, "a"]) == 2
    assert "holds a state of a PretrainedTokenModel" in capsys.readouterr().err
    text.write_text("the cat sees a tree and " * 11)
    assert main(["read", str(linear), str(text), "--out", str(tmp_path / "long.state")]) == 2
    assert "this cannot be read: the model's positions end at 256, but there are 265" in capsys.readouterr().err


def test_learned_positions_end_a_text_in_one_line(tmp_path, capsys):
    folder, sizes = str(tmp_path / "gpt2"), {"n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=16, eos_token_id=None, **sizes)).save_pretrained(folder)
    assert output(capsys, "generate", folder, "--max-new-tokens", "10", "--prompt", "the cat").startswith("the cat")
    assert main(["generate", folder, "--max-new-tokens", "11", "--prompt", "the cat"]) == 2
    expected = "this cannot be generated: the model's positions end at 16, but prompt and new tokens need 17"
    assert expected in capsys.readouterr().err


def test_an_end_that_is_no_token_ends_no_text(tmp_path, capsys):
    """A configuration of GPT-2 names token 50256 also for a smaller vocabulary."""
    folder, prompts, sizes = tmp_path / "gpt2", tmp_path / "prompts", {"n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=16, **sizes)).save_pretrained(folder)
    prompts.write_text('{"prompt": "the cat"}')
    out = tmp_path / "out"
    output(capsys, "generate", folder, *GREEDY[:-2], "--prompts", str(prompts), "--out", str(out))
    alone = output(capsys, "generate", folder, *GREEDY)
    assert alone == f"the cat{json.loads(out.read_text())['text']}\n"


def test_info_describes_layers_and_cache(linear, capsys):
    found = json.loads(output(capsys, "info", linear, "--json"))
    assert (found["class"], found["layers"]) == ("LlamaForCausalLM", ["local+elu", "softmax"])
    model = load_linearized(linear)
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        cache = model(torch.zeros(1, found["state_tokens"], dtype=torch.long)).cache
    # beside the state, a cache as a value has the number of tokens in 8 bytes
    assert found["state_bytes"] == states.num_bytes(cache) - 8
    assert found["state_bytes_per_further_token"] == 2 * 32 * 4
    shown = output(capsys, "info", linear)
    assert "local+elu: 0" in shown and "softmax: 1" in shown and "256 more for each further token" in shown


def test_a_folder_of_our_own_model_needs_no_run(tmp_path, capsys):
    sizes = {"vocab_size": 257, "dim": 16, "depth": 2, "num_heads": 2}
    LanguageModel(LanguageModelConfig(**sizes, attention=("local", "elu"))).save(tmp_path / "own")
    found = json.loads(output(capsys, "info", tmp_path / "own", "--json"))
    assert (found["layers"], found["state_bytes_per_further_token"]) == (["local", "elu"], 0)
    assert output(capsys, "generate", tmp_path / "own", *GREEDY).startswith("the cat")


def test_what_cannot_be_is_one_line(linear, finished, tmp_path, capsys):
    bare, damaged = tmp_path / "bare", tmp_path / "damaged"
    for folder in (bare, damaged):
        shutil.copytree(linear, folder, ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    (damaged / "config.json").write_text("{")
    for folder, options, message in (
        (bare, ("--chat",), "has no chat template"),
        (finished, ("--chat",), "which the tokenizer of a run does not have"),
        (bare, (), "no token that begins a text: give a prompt"),
        (linear, ("--state", "x.state", "--prompt", "a"), "no state in"),
        (linear, ("--state", "x.state", "--chat"), "--chat is for a --prompt alone"),
        (linear, ("--compile",), "--compile belongs to a run"),
        (damaged, (), "cannot be loaded"),
        (tmp_path / "none", (), "no run"),
    ):
        capsys.readouterr()
        assert main(["generate", str(folder), *options]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "3"),
        ("generation_config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("chat_template.jinja", "{% for"),
    ],
)
def test_damaged_files_are_one_line(linear, tmp_path, capsys, name, content):
    shutil.copytree(linear, tmp_path / "damaged")
    (tmp_path / "damaged" / name).write_text(content)
    assert main(["generate", str(tmp_path / "damaged"), *GREEDY, "--chat"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "damaged" in line
