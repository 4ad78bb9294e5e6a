"""The model of transformers under torch.compile, its Trainer's too."""

import pytest
import torch
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

from linattn.integrations.transformers import LinattnConfig, LinattnForCausalLM

SIZE = {"vocab_size": 31, "dim": 32, "depth": 2, "num_heads": 4, "window": 5}


def make(attention: str, **options) -> LinattnForCausalLM:
    torch._dynamo.reset()
    return LinattnForCausalLM(LinattnConfig(language_model={**SIZE, "attention": attention, **options})).double()


every_attention = pytest.mark.parametrize("attention", ["elu", "local+elu", "softmax", "favor", "retention"])


@every_attention
def test_one_graph_trains(attention):
    model, tokens = make(attention, convolution=3).train(), torch.randint(31, (2, 20))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model(tokens, labels=tokens).loss.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    compiled(tokens, labels=tokens).loss.backward()
    assert_close({name: weight.grad for name, weight in model.named_parameters()}, expected)


@every_attention
def test_a_compiled_model_reads_and_goes_on(attention):
    model, tokens = make(attention, convolution=3).eval(), torch.randint(31, (2, 20))
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).logits
        first = compiled(tokens[:, :12], attention_mask=mask[:, :12])
        logits = [first.logits]
        for end in range(13, 21):
            step = compiled(
                tokens[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=first.past_key_values
            )
            logits.append(step.logits)
    present = mask.bool()
    assert_close(torch.cat(logits, 1)[present], expected[present])


def test_the_trainer_compiles(tmp_path):
    models = [make("local+elu").float() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(31, (8, 20))]
    for model, compiled in zip(models, (False, True), strict=True):
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            torch_compile=compiled,
            torch_compile_backend="aot_eager" if compiled else None,
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-4, atol=1e-5)
