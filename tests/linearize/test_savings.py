"""What saves memory changes nothing else: logits in pieces, a shared teacher, accumulation, checkpointing, bfloat16."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from benchmarks.conversion_memory import LiveMemory
from linattn.linearize import (
    Budget,
    Rates,
    convert,
    divergence,
    fine_tune,
    linearized_layers,
    plan,
    predictions,
    scores,
    transfer,
)
from linattn.linearize.attention import own_attention
from tests.integrations.transformers.stock_attention.families import (
    DECODERS,
    ENCODER_DECODERS,
    GROUPED,
    TEXT,
    VOCABULARY,
    every,
    make,
)

from .test_conversion import batch_of
from .test_training import every_stage

LANGUAGE = {**DECODERS, "bert": ("BertForMaskedLM", TEXT), "bart": ENCODER_DECODERS["bart"]}
N = 11


def start(family: Any, *, shared: bool = False, dtype: torch.dtype = torch.float64) -> tuple[Any, list[Any]]:
    """Return a conversion far from its teacher, with weights that all dtypes have, and two batches."""
    model = make(family, torch.bfloat16).to(dtype)
    batches = [batch_of(model) for _ in range(2)]
    if family is LANGUAGE["bert"]:
        labels = torch.randint(VOCABULARY, batches[0]["input_ids"].shape)
        batches = [{**batch, "labels": labels.masked_fill(labels > 9, -100)} for batch in batches]
    conversion = convert(model, plan(model, batches[0], method="elu", window=0), shared=shared)
    with torch.no_grad():
        for layer in linearized_layers(model).values():
            # a teacher may share all other weights
            for weight in own_attention(layer).parameters():
                weight += (0.3 * torch.randn(weight.shape)).bfloat16()
                weight.copy_(weight.bfloat16())
    return conversion, batches


def gradients(conversion: Any, batches: list[Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Return the gradients of the first step of fine-tuning, and its loss."""
    found: dict[str, torch.Tensor] = {}

    def note(weights: Any, limit: float) -> None:
        found.update((name, x.grad.clone()) for name, x in conversion.model.named_parameters() if x.grad is not None)

    monkeypatch.setattr("linattn.linearize.training.clip_grad_norm_", note)
    budget = Budget(steps=1)
    training = fine_tune(conversion.model, conversion.teacher, batches, budget, rates=Rates(0.0, 0.0, 0.0))
    return found | {"loss": torch.tensor(training.losses[0], dtype=torch.float64)}


@every(LANGUAGE)
def test_logits_in_pieces_are_the_logits(family, monkeypatch):
    """Scores, distances, losses and all gradients, also where the model changes the logits of its head."""
    conversion, batches = start(family)
    model, teacher = conversion.model, conversion.teacher

    def measured() -> Any:
        rates = gradients(conversion, batches, monkeypatch)
        return divergence(model, teacher, batches), scores(model, teacher, batches)._asdict(), rates

    expected = measured()
    monkeypatch.setattr(predictions, "PIECE", 3 * VOCABULARY)
    found = predictions.predict(model, batches[0])
    assert (found.head is None) == (family in (DECODERS["gemma2"], LANGUAGE["bart"]))
    assert_close(measured(), expected)


def trained(family: Any, stage: Any, *, batches: Any = None, checkpointing: bool = False, **options: Any) -> Any:
    """Return the losses of three steps, and the conversion."""
    budget = {name: options.pop(name) for name in ("accumulate",) if name in options}
    made = {name: options.pop(name) for name in ("shared", "dtype") if name in options}
    conversion, own = start(family, **made)
    if checkpointing:
        conversion.model.activation_checkpointing_enable({"use_reentrant": False})
    options = options if stage is fine_tune else {}
    training = stage(conversion.model, conversion.teacher, batches or own, Budget(steps=3, **budget), **options)
    return training.losses, conversion


@every({name: LANGUAGE[name] for name in ("llama", "gpt2", "bert")})
@pytest.mark.parametrize(
    ("stage", "lora"), [(transfer, None), (fine_tune, None), (fine_tune, 2)], ids=["transfer", "fine_tune", "lora"]
)
def test_a_shared_teacher_is_a_teacher(family, stage, lora):
    """It stays what it was, and so does what it teaches; only weights that train exist twice."""
    losses, apart = trained(family, stage, lora=lora)
    found, together = trained(family, stage, lora=lora, shared=True)
    assert found == losses
    assert_close(together.model.state_dict(), apart.model.state_dict(), rtol=0, atol=0)
    assert_close(together.teacher.state_dict(), apart.teacher.state_dict(), rtol=0, atol=0)
    together.undo()
    assert_close(together.model.state_dict(), together.teacher.state_dict(), rtol=0, atol=0)


def test_a_shared_teacher_has_no_weights_before_training_and_after_transfer_those_of_attention_only():
    conversion, batches = start(DECODERS["llama"], shared=True)
    model, teacher = conversion.model, conversion.teacher
    known = {id(weight) for weight in model.parameters()}
    # the embeddings and so on are the model's
    assert all(id(weight) in known for weight in teacher.parameters())
    transfer(model, teacher, batches, Budget(steps=1))
    assert {name for name, weight in teacher.named_parameters() if id(weight) not in known} == {
        name for name, _ in teacher.named_parameters() if ".self_attn." in name
    }


@every_stage
def test_accumulated_batches_are_one_batch(stage):
    """Also where one of them has fewer tokens, and with the default rates."""
    ids, mask = torch.randint(3, VOCABULARY, (4, N)), torch.ones(4, N, dtype=torch.int64)
    mask[3, N // 2 :] = 0
    both = {"input_ids": ids, "attention_mask": mask}
    halves = [{name: x[rows] for name, x in both.items()} for rows in (slice(2), slice(2, 4))]
    losses, conversion = trained(DECODERS["llama"], stage, batches=[both])
    found, other = trained(DECODERS["llama"], stage, batches=halves, accumulate=2)
    assert_close(torch.tensor(found), torch.tensor(losses))
    assert_close(other.model.state_dict(), conversion.model.state_dict())


@pytest.mark.parametrize("lora", [None, 2])
def test_recomputed_activations_change_nothing(lora):
    losses, conversion = trained(DECODERS["llama"], fine_tune, lora=lora)
    found, other = trained(DECODERS["llama"], fine_tune, lora=lora, checkpointing=True)
    assert found == losses
    assert_close(other.model.state_dict(), conversion.model.state_dict(), rtol=0, atol=0)


@every(LANGUAGE)
@pytest.mark.parametrize(
    ("stage", "lora"), [(transfer, None), (fine_tune, None), (fine_tune, 2)], ids=["transfer", "fine_tune", "lora"]
)
def test_a_model_in_bfloat16_trains_as_in_float32(family, stage, lora):
    """Its weights are float32 in training, and bfloat16 again at the end."""
    expected, _ = trained(family, stage, lora=lora, dtype=torch.float32)
    losses, conversion = trained(family, stage, lora=lora, dtype=torch.bfloat16, shared=True)
    assert losses == pytest.approx(expected, rel=0.03, abs=5e-4)
    for model in (conversion.model, conversion.teacher):
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_small_steps_reach_weights_in_bfloat16():
    """A step of a rate of 1e-5 is too small for most weights in bfloat16, but their sum is not."""
    conversion, batches = start(DECODERS["llama"], dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in conversion.model.state_dict().items()}
    fine_tune(conversion.model, conversion.teacher, batches, Budget(steps=64), rates=Rates(1e-5, 1e-5, 1e-5))
    changed = [(x != before[name]).double().mean() for name, x in conversion.model.state_dict().items()]
    assert torch.stack(changed).mean() > 0.1


def test_a_step_needs_less_memory_than_one_and_a_half_copies_of_the_logits(monkeypatch):
    """With its weights, gradients and activations, which are small here: 16 pieces of 32 tokens."""
    n, vocabulary = 128, 4_096
    family = ("LlamaForCausalLM", {**GROUPED, "vocab_size": vocabulary, "num_hidden_layers": 1})
    model = make(family, torch.float32)
    batches = [{"input_ids": torch.randint(vocabulary, (4, n))}]
    conversion = convert(model, plan(model, batches[0], method="elu", window=0), shared=True)
    logits = 4 * n * vocabulary * 4

    def peak() -> int:
        with LiveMemory() as memory:
            fine_tune(model, conversion.teacher, batches, Budget(steps=1), rates=Rates(0.0, 0.0, 0.0))
        return memory.peaks[""]

    assert peak() > 4 * logits
    monkeypatch.setattr(predictions, "PIECE", 4 * n * vocabulary // 16)
    assert peak() < 1.5 * logits


def test_transfer_needs_memory_for_one_layer_at_a_time():
    def peak(layers: int) -> int:
        model = make(("LlamaForCausalLM", {**GROUPED, "num_hidden_layers": layers}), torch.float32)
        batches = [{"input_ids": torch.randint(3, VOCABULARY, (8, 64))}]
        conversion = convert(model, plan(model, batches[0], method="elu"))
        with LiveMemory() as memory:
            transfer(model, conversion.teacher, batches, Budget(steps=1))
        return memory.peaks[""]

    assert peak(6) < 1.5 * peak(2)
