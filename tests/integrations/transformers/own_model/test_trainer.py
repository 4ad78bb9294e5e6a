import pytest
import torch
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

from linattn.integrations.transformers import LinattnCache

from .models import SIZE, every_model, make, prompts


def dataset(rows: int = 24, n: int = 16) -> list[dict[str, torch.Tensor]]:
    """Rows that count upwards, so that there is something to learn."""
    tokens = (torch.arange(rows).unsqueeze(1) + torch.arange(n)) % SIZE["vocab_size"]
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(model, folder, rows=None, **options) -> Trainer:
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "learning_rate": 3e-3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": 1,
    }
    rows = dataset() if rows is None else rows
    return Trainer(model=model, args=TrainingArguments(**{**arguments, **options}), train_dataset=rows)


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", ["local+elu", "favor"])
def test_it_learns(name, tmp_path):
    run = trainer(make(name, torch.float32), tmp_path, max_steps=80, learning_rate=1e-2)
    run.train()
    history = losses(run)
    assert history[-1] < 0.5 * history[0]
    assert run.evaluate(dataset(8))["eval_loss"] < 0.5 * history[0]


def test_it_learns_in_mixed_precision(tmp_path):
    run = trainer(make("retention", torch.float32), tmp_path, max_steps=20, learning_rate=1e-2, bf16=True)
    run.train()
    assert losses(run)[-1] < 0.5 * losses(run)[0]


@pytest.mark.parametrize("name", ["local+elu", "favor", "retention"])
def test_a_run_that_is_resumed_is_the_run_without_a_break(name, tmp_path):
    # dropout, so that the random state must come back as well
    whole = make(name, torch.float32, dropout=0.1)
    first = make(name, torch.float32, dropout=0.1)
    first.load_state_dict(whole.state_dict())
    again = make(name, torch.float32, dropout=0.1)
    trainer(whole, tmp_path / "whole").train()
    trainer(first, tmp_path / "parts", save_strategy="steps", save_steps=3).train()
    rest = trainer(again, tmp_path / "parts")
    rest.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert rest.state.global_step == 8
    assert_close(again.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_accumulated_steps_are_one_large_step(tmp_path):
    rows = dataset(8)
    for index, row in enumerate(rows):
        row["labels"] = row["labels"].masked_fill(torch.arange(16) < 2 * index, -100)
    models = [make("elu") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, size in zip(models, (8, 2), strict=True):
        run = trainer(
            model,
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            max_steps=2,
            optim="sgd",
        )
        run.train_dataset = rows
        run.train()
    assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-6, atol=1e-7)


def gradients(model, tokens) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@every_model
@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_activation_checkpointing_changes_no_gradient(name, options):
    model, tokens = make(name, dropout=0.1).train(), prompts(2, 16)
    expected = gradients(model, tokens)
    calls = count_block_calls(model)
    model.activation_checkpointing_enable(options)
    assert_close(gradients(model, tokens), expected)
    # each block once forward and once more for its gradient
    assert sorted(calls) == [0, 0, 1, 1]
    calls.clear()
    model.activation_checkpointing_disable()
    assert_close(gradients(model, tokens), expected)
    assert calls == [0, 1]


def count_block_calls(model) -> list[int]:
    calls = []
    for layer, block in enumerate(model.model.blocks):
        block.register_forward_pre_hook(lambda *_, layer=layer: calls.append(layer))
    return calls


def test_every_other_block_can_be_checkpointed():
    model, tokens = make("elu", depth=4).train(), prompts(2, 16)
    expected, calls = gradients(model, tokens), count_block_calls(model)
    model.activation_checkpointing_enable(every_n_layers=2)
    assert_close(gradients(model, tokens), expected)
    assert sorted(calls) == [0, 0, 1, 2, 2, 3]


def test_checkpointing_has_no_cache():
    model, tokens = make("elu").train(), prompts()
    model.activation_checkpointing_enable()
    assert model(tokens).cache is None
    with pytest.raises(ValueError, match="without a cache"):
        model(tokens, use_cache=True)
    with pytest.raises(ValueError, match="without a cache"):
        model(tokens, cache=LinattnCache())
    assert model.eval()(tokens, use_cache=True).cache is not None


def test_the_trainer_checkpoints(tmp_path):
    models = [make("local+elu", torch.float32) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, checkpointing in zip(models, (False, True), strict=True):
        trainer(model, tmp_path, activation_checkpointing=checkpointing).train()
    assert_close(models[0].state_dict(), models[1].state_dict())


def test_a_trained_model_generates_with_a_cache(tmp_path):
    model = make("elu", torch.float32)
    run = trainer(model, tmp_path / "run", max_steps=1)
    run.train()
    run.save_model(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model")
    output = loaded.generate(prompts(), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert isinstance(output.cache, LinattnCache)


@every_model
@pytest.mark.parametrize("masked", [False, True])
def test_segments_change_no_gradient(name, masked):
    """Nor the loss, as a mean and as a share of the labels of all batches, nor what is in the cache."""
    model, tokens, options = make(name).train(), prompts(2, 12), {}
    if masked:
        mask = (torch.rand(2, 12) < 0.7).long()
        mask[1, :6] = 0
        options = {"attention_mask": mask, "num_items_in_batch": torch.tensor(50)}
    results = []
    for segment in (None, 5):
        model.segment_length = segment
        model.zero_grad()
        output = model(tokens, labels=tokens, use_cache=True, **options)
        output.loss.backward()
        later = model(tokens[:, :3], cache=output.cache).logits
        results.append([output.loss, later, *(weight.grad for weight in model.parameters())])
    # transformers computes the loss in float32
    assert_close(results[1], results[0], rtol=1e-5, atol=1e-6, check_dtype=False)


def test_the_trainer_takes_segments(tmp_path):
    models = [make("local+elu", torch.float32) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].segment_length = 5
    runs = [trainer(model, tmp_path, gradient_accumulation_steps=2, optim="sgd") for model in models]
    for run in runs:
        run.train()
    assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-4, atol=1e-5)
    first, second = (run.evaluate(dataset(8))["eval_loss"] for run in runs)
    assert second == pytest.approx(first, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_hidden_states": True}, "segment_length is 4, which does not work with output_hidden_states"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
        ({"inputs_embeds": torch.zeros(1, 9, 32), "input_ids": None}, "inputs_embeds"),
        ({"input_ids": None}, "exactly one of input_ids"),
    ],
)
def test_what_segments_do_not_have(options, message):
    model, tokens = make("elu"), prompts(1, 9)
    model.segment_length = 4
    with pytest.raises(ValueError, match=message):
        model(**({"input_ids": tokens, "labels": tokens} | options))
    model.train().activation_checkpointing_enable()
    with pytest.raises(ValueError, match="activation checkpointing"):
        model(tokens, labels=tokens)
    model.segment_length = 0
    with pytest.raises(ValueError, match="segment"):
        model.eval()(tokens, labels=tokens)
