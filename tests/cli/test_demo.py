"""What `make demo` does, with a model that learns nothing in the time it has."""

import re

import pytest
import torch

from linattn.cli import demo
from linattn.cli.main import main, make_parser
from linattn.cli.options import given_options, new_options
from linattn.cli.run_folder import open_run
from linattn.models import LanguageModel, LanguageModelConfig
from tests.cli.conftest import SHORT, TINY


def test_it_trains_reports_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "MODEL", " ".join(TINY))
    monkeypatch.setattr(demo, "TRAINING", " ".join((*SHORT, "--evaluate-tokens", "1000")))
    assert demo.run() == 0
    output = capsys.readouterr().out
    assert "validation: 7." in output and "bits per byte" in output
    assert "from byte 25 of each sequence on: 7." in output and "with the last 24 to 31 alone" in output
    assert demo.PROMPT in output
    data = open_run(tmp_path / "runs" / "demo").description["data"]
    # the library of any Python has some megabytes of sources, and no compiled files among them
    assert 3e6 < data["training"]["bytes"] + data["validation"]["bytes"] < 3e7
    assert main(["generate", "runs/demo", "--max-new-tokens", "3"]) == 0


def model(attention: str) -> LanguageModel:
    fields = {"vocab_size": 257, "dim": 16, "depth": 1, "num_heads": 2, "attention": attention, "window": 8}
    return LanguageModel(LanguageModelConfig(**fields)).eval()


def test_bits_are_those_of_the_bytes_after_the_past():
    own, windows = model("elu"), torch.randint(257, (20, 30))
    with torch.no_grad():
        probabilities = own(windows).softmax(-1)
    for row, found in zip(range(20), demo.bits_after(own, windows, 7), strict=True):
        expected = [-torch.log2(probabilities[row, i - 1, windows[row, i]]) for i in range(7, 30)]
        torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize(("attention", "is_lost"), [("local", False), ("elu", True)])
def test_a_window_loses_nothing_without_the_states_and_a_sum_does(finished, monkeypatch, attention, is_lost):
    run, own = open_run(finished), model(attention)
    with torch.no_grad():
        # so large that the past shows in the logits
        for weight in own.parameters():
            weight.mul_(15 if weight.dim() > 1 else 1)
    monkeypatch.setattr(run, "model", lambda: own)
    # several blocks after the short past
    monkeypatch.setitem(run.description["options"], "context", 64)
    past, block, whole, short = demo.bits_without_states(run)
    assert (past, block) == (24, 8)
    assert (abs(short - whole) > 1e-3) == is_lost


def test_the_demos_windows_and_convolutions_see_no_more_than_the_short_past():
    parser = make_parser()
    words = ["train", "x", "--out", "y", *demo.MODEL.split(), *demo.TRAINING.split()]
    options = new_options(given_options(parser.parse_args(words)))
    config = options.language_model(257)
    windows = config.layers.count("local")
    assert windows and re.fullmatch(r"(gated_delta|kda|local)(,(gated_delta|kda|local))*", ",".join(config.layers))
    assert windows * (config.window - 1) + config.depth * (config.convolution - 1) <= 3 * config.window
