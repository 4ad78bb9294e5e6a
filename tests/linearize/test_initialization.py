"""A conversion starts near softmax: new parts have no effect at first, or as little as they can."""

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

from linattn.linearize import convert, linearized_layers, load_linearized, plan
from tests.attention.cases import FADING
from tests.integrations.transformers.stock_attention.families import DECODERS, make
from tests.integrations.transformers.stock_attention.test_attention import logits, tokens


def decays(method: str) -> list[torch.Tensor]:
    model = make(DECODERS["gpt2"])
    convert(model, plan(model, method=method))
    layers = [layer.linear_attention for layer in linearized_layers(model).values()]
    x = torch.randn(2, 9, 32).double()
    return [layer.prepare(x, None, None)[1][0].log_decay for layer in layers]


@pytest.mark.parametrize("method", ["elu", *(name for name in FADING if name != "ssd")])
def test_the_first_head_remembers_and_others_forget_slowly(method):
    for log_decay in decays(method):
        # the same for every token, as the weights are zeros
        assert_close(log_decay, log_decay[:1, :, :1].expand_as(log_decay))
        first, *others = log_decay.unbind(1)
        assert first.abs().max() < 1e-12
        assert all(-head.max() > 1e-3 and -head.min() < 0.06 for head in others)
        assert all(a.max() > b.max() for a, b in itertools.pairwise(others))


def test_a_decay_of_one_stays_one():
    model, ids = make(DECODERS["llama"]), tokens()
    convert(model, plan(model, method="elu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    for layer in linearized_layers(model).values():
        gates = layer.linear_attention.prepare(torch.randn(2, 9, 32).double(), None, None)[1][0]
        assert gates.log_decay[:, 0].abs().max() < 1e-6
        assert gates.log_decay[:, 1].abs().min() > 1e-6


def test_new_parts_have_no_effect_beside_softmax():
    model, ids = make(DECODERS["llama"]), tokens()
    expected = logits(model, input_ids=ids)
    convert(model, plan(model, method="local", window=11, convolution=4))
    assert_close(logits(model, input_ids=ids), expected)


def test_the_share_of_the_window_is_used_at_first():
    model, ids = make(DECODERS["llama"]), tokens()
    expected, distances = logits(model, input_ids=ids), []
    for window in (0, 11):
        conversion = convert(model, plan(model, method="elu", window=window))
        distances.append((logits(model, input_ids=ids) - expected).square().mean())
        conversion.undo()
    assert distances[1] < distances[0] / 2


def test_a_linearized_model_takes_adapters_and_trains_on(tmp_path):
    model, ids = make(DECODERS["llama"], torch.float32), tokens()
    convert(model, plan(model, method="hedgehog"))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["linear_attention"]))
    adapted(ids, labels=ids).loss.backward()
    trained = {name for name, weight in adapted.named_parameters() if weight.grad is not None}
    assert any("lora" in name for name in trained)
    assert any("linear_attention" in name for name in trained)
    adapted = adapted.unload()
    rows = [{"input_ids": row, "labels": row} for row in ids]
    args = TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_steps=2, disable_tqdm=True
    )
    Trainer(adapted, args, train_dataset=rows).train()
    loaded = load_linearized(tmp_path / "checkpoint-2")
    assert_close(loaded.state_dict(), adapted.state_dict(), rtol=0, atol=0)
