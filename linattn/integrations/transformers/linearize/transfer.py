"""The two stages of training after a conversion: layer by layer towards the teacher's attention, then the whole model
towards its outputs, as LoLCATs has them. Zhang et al., https://arxiv.org/abs/2410.10254"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.checks import check_numbers
from linattn.integrations.transformers.linearize.distance import (
    divergence,
    layer_distance,
    matched_layers,
    output_distance,
    with_labels,
)
from linattn.integrations.transformers.linearize.observe import Batch, run
from linattn.integrations.transformers.linearize.parts import linearized_layers, own_attention
from linattn.integrations.transformers.linearize.training import Budget, Training, train


@dataclass(frozen=True)
class Rates:
    """Holds the highest learning rates: of `stock` weights, which the model had, and of `new` ones."""

    stock: float
    new: float

    def __post_init__(self) -> None:
        check_numbers(stock=self.stock, new=self.new)


RATES = Rates(4e-3, 1e-2)
FIRST_STAGE = 0.2
"""The share of a conversion's steps that is best left to `transfer`."""
# batches that the distance is measured on
MEASURED = 4


def transfer(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Sequence[Batch],
    budget: Budget,
    *,
    rates: Rates = RATES,
) -> Training:
    """Train every linearized layer at once to do what the teacher's does with the same input, given in one run of the
    teacher: the loss is the mean of the layers' relative errors, half of it at the tokens whose predictions the labels
    of a batch ask for, if they ask for some only. All weights outside of these layers stay.

    Training repeats the `batches` within the `budget`; the `rates` fall to zero."""

    def objective(student: PreTrainedModel, batch: Batch) -> Tensor:
        outputs = matched_layers(student, teacher, batch).values()
        return torch.stack([layer_distance(student, batch, layer) for layer in outputs]).mean()

    if not (layers := linearized_layers(model).values()):
        raise ValueError(f"no layer of this {type(model).__name__} is linear: convert it first")
    weights = [weight for layer in layers for weight in layer.parameters()]
    return train(model, objective, batches, _groups(model, weights, rates), budget)


def fine_tune(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Sequence[Batch],
    budget: Budget,
    *,
    rates: Rates | None = None,
    lora: int | None = None,
) -> Training:
    """Train the model towards the teacher's outputs: half the distance to them, a KL divergence where there are logits,
    and half the model's own loss on the labels of a batch or, for a language model, on its tokens.

    Training repeats the `batches` within the `budget`. All weights train; with `lora`, only the new ones and adapters
    of this rank, which are merged in the end. Without `rates`, they are those of `transfer` times min(1, 1.5 √d) for
    the distance d at the beginning: larger steps would lead a model that is near its teacher away from it, and smaller
    ones would not bring one from afar. They fall to zero."""

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
        rates = rates or _fitting_rates(model, teacher, batches)
        return train(model, objective, batches, _groups(model, weights, rates), budget)


def _fitting_rates(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> Rates:
    measured = [batches[i] for i in range(min(MEASURED, len(batches)))]
    # a divergence of zero may be rounded to less
    factor = min(1.0, 1.5 * math.sqrt(max(0.0, divergence(model, teacher, measured))))
    return Rates(factor * RATES.stock, factor * RATES.new)


def _new_weights(model: nn.Module) -> set[int]:
    layers = linearized_layers(model).values()
    return {id(weight) for layer in layers for weight in own_attention(layer).parameters()}


def _groups(model: nn.Module, weights: Iterable[nn.Parameter], rates: Rates) -> list[dict[str, Any]]:
    """Return the optimizer's groups, each weight in one of them however many layers share it."""
    new, unique = _new_weights(model), {id(weight): weight for weight in weights}
    pairs = [
        ([weight for key, weight in unique.items() if key not in new], rates.stock),
        ([weight for key, weight in unique.items() if key in new], rates.new),
    ]
    return [{"params": params, "lr": rate} for params, rate in pairs if params]


@contextmanager
def _adapters(model: PreTrainedModel, rank: int) -> Iterator[list[nn.Parameter]]:
    """Put LoRA adapters on the linear maps that the model had, and merge them in the end. Hu et al.,
    https://arxiv.org/abs/2106.09685"""
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
