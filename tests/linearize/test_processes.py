"""Two processes train what one process does with batches of twice the size, also if they share the weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from linattn.linearize import Budget, Rates, convert, divergence, fine_tune, layer_errors, plan, predictions, transfer
from linattn.linearize.processes import sum_gradients
from tests.integrations.transformers.stock_attention.families import DECODERS, IMAGES, TEXT, VOCABULARY, make
from tests.integrations.transformers.stock_attention.families import ENCODER_DECODERS as PAIRS
from tests.processes import needs_processes, run_in_two

from .test_conversion import batch_of

FAMILIES = {
    "llama": DECODERS["llama"],
    "bert": ("BertForMaskedLM", TEXT),
    "bart": PAIRS["bart"],
    "vit": IMAGES["vit"],
}
ADAPTERS: dict[str, Any] = {"lora": 2, "rates": Rates(1e-3, 1e-2, 1e-2)}
CASES: list[tuple[str, Any, dict[str, Any], bool]] = [
    *(("llama", transfer, {}, shard) for shard in (False, True)),
    *(("llama", fine_tune, {}, shard) for shard in (False, True)),
    ("llama", fine_tune, ADAPTERS, True),
    ("bert", transfer, {}, False),
    ("bert", fine_tune, {}, True),
    ("bart", transfer, {}, False),
    ("vit", fine_tune, {}, False),
]


def batches_of(family: Any) -> list[dict[str, Any]]:
    """Return four batches. Those of a masked language model have different numbers of labels."""
    torch.manual_seed(1)
    model = make(family)
    batches = [batch_of(model) for _ in range(4)]
    if family is FAMILIES["bert"]:
        for batch in batches:
            labels = torch.randint(VOCABULARY, batch["input_ids"].shape)
            batch["labels"] = labels.masked_fill(labels > 40, -100)
    return batches


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.cat([x, other[name]]) if isinstance(x, torch.Tensor) else x for name, x in one.items()}


def trained(family: Any, stage: Any, options: dict[str, Any], batches: Any, **budget: Any) -> Any:
    """Return the losses, the weights and the validations of two steps with two batches per process each."""
    torch.manual_seed(0)
    model = make(family)
    with torch.no_grad():
        for weight in model.parameters():
            # far from its teacher, as rates follow from the distance
            weight *= 2
    conversion = convert(model, plan(model, batches[0], method="hedgehog", window=0), shared=True)
    # the logits in pieces, which have gradients of their own, and are float64 also where transformers' loss is not
    predictions.PIECE = 3 * VOCABULARY
    held_out, measure = batches_of(family)[:1], _layer_errors if stage is transfer else _divergence
    budget = Budget(steps=2, accumulate=2, validate=partial(measure, conversion.teacher, held_out), **budget)
    training = stage(model, conversion.teacher, batches, budget, **options)
    return training.losses, model.state_dict(), training.validations


def _layer_errors(teacher: Any, held_out: Any, model: Any) -> dict[str, float]:
    return {str(index): error for index, error in layer_errors(model, teacher, held_out).items()}


def _divergence(teacher: Any, held_out: Any, model: Any) -> dict[str, float]:
    return {"divergence": divergence(model, teacher, held_out)}


class Interrupted(Exception):
    pass


def interrupt(progress: Any) -> None:
    if progress.step == 1:
        raise Interrupted


def train_in_two(rank: int, folder: Path) -> None:
    found = []
    for name, stage, options, shard in CASES:
        family, cut_off = FAMILIES[name], folder / f"{len(found)}"
        saved: dict[str, Any] = {"folder": cut_off, "save_every": 1, "shard": shard}
        if name == "llama" and stage is fine_tune and not options:
            with pytest.raises(Interrupted):
                trained(family, stage, options, batches_of(family), report=interrupt, **saved)
            dist.barrier()
        found.append(trained(family, stage, options, batches_of(family), **saved))
    if rank == 0:
        torch.save(found, folder / "found")
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    weights[0].grad = torch.full((2,), 1.0 + rank)
    if rank == 1:
        # as of an expert to which no token of the other process went
        weights[1].grad = torch.ones(2)
    sum_gradients(weights)
    gradients = [None if weight.grad is None else weight.grad.tolist() for weight in weights]
    assert gradients == [[3.0, 3.0], [1.0, 1.0], None]


@needs_processes
def test_two_processes_are_one_with_batches_of_twice_the_size(tmp_path, monkeypatch):
    """Some are interrupted after the first step, and go on from its checkpoint."""
    run_in_two(train_in_two, tmp_path)
    monkeypatch.setattr(predictions, "PIECE", predictions.PIECE)
    for case, found in zip(CASES, torch.load(tmp_path / "found"), strict=True):
        name, stage, options, _ = case
        first, second, third, fourth = batches_of(FAMILIES[name])
        pairs = [joined(first, second), joined(third, fourth)]
        losses, weights, validations = trained(FAMILIES[name], stage, options, pairs, save_every=1)
        assert found[0] == pytest.approx(losses, rel=1e-12, abs=0), case
        assert found[2].keys() == validations.keys() == {1, 2}
        for step, figures in validations.items():
            assert found[2][step] == pytest.approx(figures, rel=1e-11, abs=0), (case, step)
        assert_close(found[1], weights, rtol=1e-12, atol=1e-12, msg=lambda text, case=case: f"{case}: {text}")
