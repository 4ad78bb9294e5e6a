"""The two stages of training after a conversion: each layer towards the output of the teacher's attention, then the
whole model towards the teacher's output, as in LoLCATs. Zhang et al., https://arxiv.org/abs/2410.10254"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.checks import check_numbers, check_types, extra
from linattn.linearize.attention import linearized_layers, own_attention
from linattn.linearize.calls import Batch, run
from linattn.linearize.distance import divergence, layer_distance, layer_outputs, output_distance, with_labels
from linattn.linearize.training import Budget, Training, train


@dataclass(frozen=True)
class Rates:
    """Holds the highest learning rates of `stock` weights, which the model had before, and of `new` ones."""

    stock: float
    new: float

    def __post_init__(self) -> None:
        check_numbers(stock=self.stock, new=self.new)


RATES = Rates(4e-3, 1e-2)
FIRST_STAGE = 0.2
"""The share of a conversion's steps that is best spent on `transfer`."""
# the number of batches that the first distance is measured on
MEASURED = 4


def transfer(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Sequence[Batch],
    budget: Budget,
    *,
    rates: Rates = RATES,
) -> Training:
    """Train all linearized layers at once, each to give the output of the teacher's layer for the same input.

    The loss is the mean of the layers' relative errors. If only some tokens have labels, half of it is the error at
    these tokens. Weights outside of these layers do not change. The `batches` repeat within the `budget`; the `rates`
    fall to zero."""

    def objective(student: PreTrainedModel, batch: Batch) -> Tensor:
        outputs = layer_outputs(student, teacher, batch).values()
        return torch.stack([layer_distance(student, batch, layer) for layer in outputs]).mean()

    if not (layers := linearized_layers(model).values()):
        raise ValueError(f"no layer of this {type(model).__name__} is linear: convert it first")
    weights = [weight for layer in layers for weight in layer.parameters()]
    return train(model, objective, batches, _groups(model, weights, rates), budget)


@check_types
def fine_tune(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Sequence[Batch],
    budget: Budget,
    *,
    rates: Rates | None = None,
    lora: int | None = None,
) -> Training:
    """Train the model towards the teacher's outputs. The loss is half the distance to them, a KL divergence where there
    are logits, and half the model's own loss on the labels of a batch or, for a language model, on its tokens.

    All weights train; with `lora`, only the new ones and adapters of this rank, which are merged at the end. The
    `batches` repeat within the `budget`; the `rates` fall to zero. By default they are those of `transfer` times
    min(1, 1.5 √d) for the distance d at the beginning: larger steps would lead a model that is near its teacher away
    from it, and smaller ones would take too long for a model that is far away."""

    def objective(student: PreTrainedModel, batch: Batch) -> Tensor:
        batch = with_labels(student, batch)
        with torch.no_grad():
            target = run(teacher, batch)
        output = run(student, batch)
        distance = output_distance(student, output, target, batch)
        return distance if output.get("loss") is None else (distance + output.loss) / 2

    with ExitStack() as stack:
        weights = list(model.parameters())
        if lora is not None:
            new = [weight for weight in weights if id(weight) in _new_weights(model)]
            weights = [*new, *stack.enter_context(_adapters(model, lora))]
        rates = rates or _default_rates(model, teacher, batches)
        return train(model, objective, batches, _groups(model, weights, rates), budget)


def _default_rates(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> Rates:
    measured = [batches[i] for i in range(min(MEASURED, len(batches)))]
    # a divergence of zero may be rounded to less
    factor = min(1.0, 1.5 * math.sqrt(max(0.0, divergence(model, teacher, measured))))
    return Rates(factor * RATES.stock, factor * RATES.new)


def _new_weights(model: nn.Module) -> set[int]:
    layers = linearized_layers(model).values()
    return {id(weight) for layer in layers for weight in own_attention(layer).parameters()}


def _groups(model: nn.Module, weights: Iterable[nn.Parameter], rates: Rates) -> list[dict[str, Any]]:
    """Return AdamW's groups of `weights`, stock and new ones, each weight once, also if several layers share it."""
    new, unique = _new_weights(model), {id(weight): weight for weight in weights}
    pairs = [
        ([weight for key, weight in unique.items() if key not in new], rates.stock),
        ([weight for key, weight in unique.items() if key in new], rates.new),
    ]
    return [{"params": params, "lr": rate} for params, rate in pairs if params]


@contextmanager
def _adapters(model: PreTrainedModel, rank: int) -> Iterator[list[nn.Parameter]]:
    """Add LoRA adapters to the model's old linear maps inside the block, yield their weights, and merge them at the
    end. Hu et al., https://arxiv.org/abs/2106.09685"""
    with extra("cli"):
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    new = _new_weights(model)
    outputs = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not outputs and id(module.weight) not in new
    ]
    transposed = any(isinstance(model.get_submodule(name), Conv1D) for name in names)
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, fan_in_fan_out=transposed)
    inject_adapter_in_model(settings, model)
    try:
        yield [weight for name, weight in model.named_parameters() if "lora_" in name]
    finally:
        for name, module in list(model.named_modules()):
            if isinstance(module, BaseTunerLayer):
                module.merge()
                model.set_submodule(name, module.get_base_layer())
        del model.peft_config
