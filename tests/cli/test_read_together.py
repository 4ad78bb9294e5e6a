"""Processes that read a text together leave the state that one process leaves."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from linattn import LanguageModel, LanguageModelConfig
from linattn.cli.main import main
from linattn.states import describe_state
from tests.cli.test_sharing import launch
from tests.processes import needs_processes


@needs_processes
@pytest.mark.parametrize("size", [2, 3])
def test_the_state_is_that_of_one_process(finished, text, tmp_path, capsys, size):
    """Pieces may be shorter than the number of processes: the first one is a separator alone."""
    alone, together = tmp_path / "alone.state", tmp_path / "together.state"
    assert main(["read", str(finished), str(text), "--out", str(alone), "--cpu"]) == 0
    (report,) = launch(size, tmp_path, ["read", str(finished), str(text), "--out", str(together), "--cpu"])
    ours, theirs = load_file(together), load_file(alone)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert describe_state(together).num_tokens == describe_state(alone).num_tokens
    assert report.count("tokens/s]") == 1
    arguments = ["--prompt", "the cat", "--temperature", "0", "--max-new-tokens", "20"]
    texts = []
    for state in (alone, together):
        capsys.readouterr()
        assert main(["generate", str(finished), "--state", str(state), *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@needs_processes
def test_a_prompt_is_read_together(finished, tmp_path, capsys):
    """The text is that of one process, and one process prints it; the prompt has several pieces."""
    prompt = "the cat sees a tree and the dog runs. " * 440
    command = ["generate", str(finished), "--prompt", prompt, "--max-new-tokens", "20", "--seed", "1", "--cpu"]
    assert main(command) == 0
    alone = capsys.readouterr().out
    (report,) = launch(2, tmp_path, command)
    assert report.startswith(alone) and report.count("tokens/s") == 1


@needs_processes
def test_what_takes_one_process_or_other_positions_is_refused_once(finished, text, tmp_path):
    generate, out = ["generate", str(finished), "--prompt", "the"], ["--out", str(tmp_path / "x.state"), "--cpu"]
    short, stock = shutil.copytree(finished, tmp_path / "short"), tmp_path / "stock"
    sizes = {"vocab_size": 257, "dim": 16, "depth": 1, "num_heads": 2}
    LanguageModel(LanguageModelConfig(**sizes, attention="elu", positions="learned", max_length=64)).save(short)
    LlamaConfig().save_pretrained(stock)
    beyond = "the model's positions end at 64, but there are"
    cases = {
        "only the first process has stdin: name files instead of -": ["read", str(finished), "-", *out],
        f"{stock} is no run, so it takes one process, but there are 2": ["read", str(stock), str(text), *out],
        f"this cannot be read: {beyond}": ["read", str(short), str(text), *out],
        f"this cannot be generated: {beyond}": ["generate", str(short), "--prompt", "the " * 40, "--cpu"],
        "--repetition-penalty counts tokens of the prompt": [*generate, "--repetition-penalty", "2"],
        "--compile takes one process, but there are 2": [*generate, "--compile"],
    }
    reports = launch(2, tmp_path, *cases.values(), status=2)
    for message, report in zip(cases, reports, strict=True):
        assert report.count(message) == 1
