"""The two stages of training after a conversion: each layer towards the output of the teacher's attention, then the
whole model towards the teacher's output, as in LoLCATs. Zhang et al., https://arxiv.org/abs/2410.10254"""

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from linattn.checks import check_numbers, check_types, extra
from linattn.linearize.attention import linearized_layers, own_attention
from linattn.linearize.calls import Batch
from linattn.linearize.conversion import give_own_weights
from linattn.linearize.distance import LayerOutputs, compare_layers
from linattn.linearize.layer_loss import error_sum, error_weights, moments, squared_deviations, squared_error
from linattn.linearize.predictions import Predictions, divergence_sum, pieces, predict, with_labels
from linattn.linearize.processes import first_batches, gather, sum_over_processes
from linattn.linearize.trained_weights import trainable
from linattn.linearize.training import Add, Budget, Training, backward, check_training, train
from linattn.nn.modes import evaluating


@dataclass(frozen=True)
class Rates:
    """Holds the highest learning rates of weights that the model had before, `stock`, and of `new` ones, which take
    steps of AdamW, and of the `hidden` ones among the first, which take those of `Muon`: matrices of linear layers in
    the model's blocks."""

    stock: float
    new: float
    hidden: float

    def __post_init__(self) -> None:
        check_numbers(stock=self.stock, new=self.new, hidden=self.hidden)


RATES = Rates(4e-3, 1e-2, 3.2e-2)
WIDTH = 128
"""The hidden size up to which these rates are good. Beyond, the effect of a step grows with the size."""
FULL_STEPS = 100
"""The steps of a conversion, both stages, from which on these rates are good. Fewer do not average their noise out."""
FIRST_STAGE = 0.2
"""The share of a conversion's steps that is best spent on `transfer`."""
# the number of updates whose batches the first distance is measured on
MEASURED = 4


def transfer(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Sequence[Batch],
    budget: Budget,
    *,
    rates: Rates | None = None,
) -> Training:
    """Train all linearized layers at once, each to give the output of the teacher's layer for the same input.

    The loss is the mean of the layers' squared errors, each as a share of the variance of the teacher's output over the
    first update's tokens. If only some tokens have labels, half of it is the error at these tokens. Weights outside of
    these layers do not change. The `batches` repeat within the `budget`; the `rates` fall to zero. By default they are
    4e-3 for stock weights, 1e-2 for new and 3.2e-2 for hidden ones, times min(1, 128 / hidden size) and, for n steps,
    min(1, n / 20)."""
    if not (layers := linearized_layers(model).values()):
        raise ValueError(f"no layer of this {type(model).__name__} is linear: convert it first")
    check_training(model, teacher, batches)
    factors = error_weights(model, teacher, first_batches(batches, 1, budget.accumulate))

    def objective(student: PreTrainedModel, batch: Batch, add: Add) -> int:
        tokens = 0

        def see(index: int, outputs: LayerOutputs) -> None:
            nonlocal tokens
            error, count = error_sum(student, batch, outputs, factors[index])
            tokens += count
            add(error)

        compare_layers(student, teacher, batch, see)
        return tokens

    weights = [weight for layer in layers for weight in layer.parameters()]
    give_own_weights(teacher, weights)
    full_steps = FIRST_STAGE * FULL_STEPS if rates is None else 1.0
    width = _width_factor(model)
    groups = _groups(model, weights, rates or _scaled(width, width), hidden_matrices(model))
    return train(model, objective, batches, groups, budget, full_steps=full_steps)


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
    """Train the model towards the teacher's outputs. The loss is half the distance to them, as `divergence`
    measures it, and half the model's own loss on the labels of a batch or, for a language model, on its tokens.

    All weights train; with `lora`, only the new ones and adapters of this rank, which are merged at the end. The
    `batches` repeat within the `budget`; the `rates` fall to zero. By default they are those of `transfer`, times
    min(1, n / 80) for n steps and, for the distance d at the beginning, times min(1, 1.5 √d), those of hidden weights
    times min(1, d): larger steps would lead a model that is near its teacher away from it, and smaller ones would take
    too long for a model that is far away."""
    check_training(model, teacher, batches)
    scale = _output_scale(teacher, batches, budget.accumulate)

    def objective(student: PreTrainedModel, batch: Batch, add: Add) -> int:
        labeled = with_labels(student, batch)
        with torch.no_grad():
            target = predict(teacher, labeled, inputs=batch)
        return _add_distance(predict(student, labeled), target, scale, add)

    with ExitStack() as stack:
        weights, hidden = list(model.parameters()), hidden_matrices(model)
        if lora is not None:
            # peft freezes the other weights
            stack.enter_context(trainable(model, ()))
            new = [weight for weight in weights if id(weight) in _new_weights(model)]
            weights = [*new, *stack.enter_context(_adapters(model, teacher, lora))]
        give_own_weights(teacher, weights)
        full_steps = (1 - FIRST_STAGE) * FULL_STEPS if rates is None else 1.0
        rates = rates or _default_rates(model, teacher, batches, scale, budget.accumulate)
        groups = _groups(model, weights, rates, hidden)
        return train(model, objective, batches, groups, budget, full_steps=full_steps)


def _add_distance(found: Predictions, target: Predictions, scale: float, add: Add) -> int:
    """Add the sum, over all places, of the distance to the `target` and of the model's own loss, half of each, or of
    the distance alone; return the number of places."""
    count = len(found.vectors)
    if found.head is None:
        distance = _distance_sum(found, target, scale)
        add(distance if found.loss is None else (distance + count * found.loss) / 2)
        return count
    # the gradients of the pieces of the logits sum up in that of the last hidden states
    hidden = found.vectors.detach().requires_grad_()
    for y, expected, labels in pieces(found._replace(vectors=hidden), target):
        distance = divergence_sum(y, expected)
        if labels is not None:
            distance = (distance + F.cross_entropy(y, labels, reduction="sum")) / 2
        add(distance)
    backward(found.vectors, hidden.grad)
    return count


def _distance_sum(found: Predictions, target: Predictions, scale: float) -> Tensor:
    """Return the distance of outputs from the teacher's, summed over places: KL divergences in nats, or squared errors
    times `scale`."""
    if not target.classify:
        return scale * squared_error(found.vectors, target.vectors)
    parts = [divergence_sum(y, expected) for y, expected, _ in pieces(found, target)]
    return torch.stack(parts).sum()


@torch.no_grad()
def _output_scale(teacher: PreTrainedModel, batches: Sequence[Batch], accumulate: int) -> float:
    """Return the factor that makes the mean squared error of outputs a share of the variance of the teacher's on the
    first update; 1 if the distance is a KL divergence."""
    parts = []
    with evaluating(teacher):
        for batch in first_batches(batches, 1, accumulate):
            target = predict(teacher, with_labels(teacher, batch), inputs=batch)
            if target.classify:
                return 1.0
            parts.append(moments(target.vectors))
    everywhere = [part for each in gather(parts) for part in each]
    return sum(part.number for part in everywhere) / squared_deviations(everywhere)


@torch.no_grad()
def _default_rates(
    model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch], scale: float, accumulate: int
) -> Rates:
    total, count = 0.0, 0
    with evaluating(model), evaluating(teacher):
        for batch in first_batches(batches, MEASURED, accumulate):
            found, target = predict(model, batch), predict(teacher, batch)
            total, count = total + float(_distance_sum(found, target, scale)), count + len(found.vectors)
    total, count = sum_over_processes(total, count)
    # a divergence of zero may be rounded to less
    distance, width = max(0.0, total / count), _width_factor(model)
    return _scaled(min(1.0, 1.5 * math.sqrt(distance)) * width, min(1.0, distance) * width)


def _width_factor(model: PreTrainedModel) -> float:
    """Return a factor of the rates that falls as the hidden size grows, as each output of a layer then sums up more
    changes. Yang et al., https://arxiv.org/abs/2203.03466"""
    return min(1.0, WIDTH / getattr(model.config.get_text_config(), "hidden_size", WIDTH))


def _scaled(factor: float, hidden: float) -> Rates:
    return Rates(factor * RATES.stock, factor * RATES.new, hidden * RATES.hidden)


def _new_weights(model: nn.Module) -> set[int]:
    layers = linearized_layers(model).values()
    return {id(weight) for layer in layers for weight in own_attention(layer).parameters()}


def _groups(model: nn.Module, weights: Iterable[nn.Parameter], rates: Rates, hidden: Set[int]) -> list[dict[str, Any]]:
    """Return groups of `weights` for `Muon`, each weight once, also if several layers share it. Those whose ids are in
    `hidden` take orthogonal steps."""
    new, unique = _new_weights(model), {id(weight): weight for weight in weights}
    kinds = [
        ({"lr": rates.stock}, unique.keys() - new - hidden),
        ({"lr": rates.new}, unique.keys() & new),
        ({"lr": rates.hidden, "orthogonal": True}, unique.keys() & hidden),
    ]
    # in the order of the weights, in which a checkpoint numbers them
    groups = [{"params": [unique[key] for key in unique if key in own], **kind} for kind, own in kinds]
    return [group for group in groups if group["params"]]


def hidden_matrices(model: nn.Module) -> set[int]:
    """Return the ids of the stock matrices of all linear layers in the model's blocks."""
    blocks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    linear = [x for each in blocks for x in each.modules() if isinstance(x, (nn.Linear, Conv1D))]
    return {id(x.weight) for x in linear} - _new_weights(model)


@contextmanager
def _adapters(model: PreTrainedModel, teacher: PreTrainedModel, rank: int) -> Iterator[list[nn.Parameter]]:
    """Add LoRA adapters to the model's old linear maps inside the block, yield their weights, and merge them at the
    end, or remove them after an error. The teacher has the weights without them until then.
    Hu et al., https://arxiv.org/abs/2106.09685"""
    with extra("cli"):
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

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
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    base: dict[str, Any] = {name: module.get_base_layer() for name, module in adapted.items()}
    try:
        yield [weight for name, weight in model.named_parameters() if "lora_" in name]
        give_own_weights(teacher, [layer.weight for layer in base.values()])
        # after an error the adapters are left out: a training that resumes has them in its checkpoint
        for module in adapted.values():
            module.merge()
    finally:
        for name, layer in base.items():
            model.set_submodule(name, layer)
        del model.peft_config
