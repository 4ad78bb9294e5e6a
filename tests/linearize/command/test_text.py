"""The text of a conversion: what is held out is not trained on, and windows reach all of it."""

from collections import Counter

import pytest
import torch

from linattn.linearize.command import text
from linattn.linearize.command.text import TrainingBatches, held_out_batches, read_tokens


def test_what_is_held_out_is_not_trained_on(tmp_path, monkeypatch):
    """Of pieces of ten bytes, each with its number, every 20th."""
    monkeypatch.setattr(text, "PIECE", 10)
    (tmp_path / "text").write_bytes(b"".join(bytes([number] * 10) for number in range(45)))
    tokens = read_tokens([str(tmp_path)], (), None)
    assert Counter(tokens.held_out.tolist()) == {19: 10, 39: 10}
    assert Counter(tokens.training.tolist()) == {number: 10 for number in range(45) if number not in (19, 39)}


@pytest.mark.parametrize(("length", "held"), [(100, 5), (20, 1), (19, 0)])
def test_of_a_short_text_the_end_is_held_out(tmp_path, length, held):
    (tmp_path / "text").write_bytes(bytes(range(length)))
    tokens = read_tokens([str(tmp_path / "text")], (), None)
    assert torch.cat(tokens).tolist() == list(range(length))
    assert len(tokens.held_out) == held


@pytest.mark.parametrize(("length", "count"), [(16, 9), (100, 9), (100, 2), (37, 1)])
def test_held_out_windows_do_not_overlap(length, count):
    batches = held_out_batches(torch.arange(length), context=8, batch=3, count=count)
    rows = torch.cat([batch["input_ids"] for batch in batches])
    assert (rows.diff() == 1).all() and len(rows.unique()) == rows.numel()
    assert len(rows) == min(3 * count, length // 8)


def test_training_windows_reach_every_token_and_depend_on_the_seed_and_their_number():
    one, same, other = (TrainingBatches(torch.arange(20), context=8, batch=4, seed=seed) for seed in (0, 0, 1))
    rows = torch.cat([one[i]["input_ids"] for i in range(50)])
    assert (rows.diff() == 1).all() and set(rows.flatten().tolist()) == set(range(20))
    assert torch.equal(same[7]["input_ids"], one[7]["input_ids"])
    assert not torch.equal(other[7]["input_ids"], one[7]["input_ids"])
