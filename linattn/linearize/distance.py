"""The distance of a linearized model from its teacher: of their outputs, and layer by layer."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.integrations.transformers.documents import present_keys
from linattn.linearize.attention import LinearizedAttention, linearized_layers, named_arguments, own_attention
from linattn.linearize.calls import Batch
from linattn.linearize.predictions import (
    Predictions,
    accurate,
    divergence_sum,
    pieces,
    predict,
    run_body,
)
from linattn.nn.modes import evaluating


class Diverged(ValueError):
    """Raised for a loss that is not finite."""


def relative_error(
    y: Float[Tensor, "*b d"], target: Float[Tensor, "*b d"], mask: Bool[Tensor, "*b"] | None = None
) -> Float[Tensor, ""]:
    """Return the mean square of y − target as a share of the target's variance over tokens, for the tokens in `mask`
    (None: all)."""
    y, target = accurate(y), accurate(target)
    if mask is not None:
        y, target = y[mask], target[mask]
    target = target.flatten(0, -2)
    spread = (target - target.mean(0)).square().mean()
    # a single token has no variance
    return (y.flatten(0, -2) - target).square().mean() / torch.where(spread == 0, 1, spread)


def output_distance(found: Predictions, target: Predictions) -> Float[Tensor, ""]:
    """Return the distance of a model's predictions from the teacher's, its `target`.

    It is the mean KL divergence in nats over the places or, for hidden states and for logits of a regression or of
    several labels at once, the relative error."""
    if not target.classify:
        return relative_error(found.vectors, target.vectors)
    total = sum((divergence_sum(y, expected) for y, expected, _ in pieces(found, target)), target.vectors.new_zeros(()))
    return total / len(target.vectors)


@torch.no_grad()
def divergence(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> float:
    """Return the mean distance of the model's outputs from the teacher's over the batches: their KL divergence in nats
    or, for hidden states and for logits of a regression or of several labels at once, their relative error."""
    require_batches(batches)
    with evaluating(model), evaluating(teacher):
        distances = [float(output_distance(predict(model, each), predict(teacher, each))) for each in batches]
    return math.fsum(distances) / len(distances)


def require_batches(batches: Sequence[Batch]) -> None:
    if isinstance(batches, Mapping) or not hasattr(batches, "__len__"):
        raise ValueError(f"batches must be a sequence of batches, but are a {type(batches).__name__}")
    if not len(batches):
        raise ValueError("give at least one batch: there is none to run the model on")


def require_pair(model: PreTrainedModel, teacher: PreTrainedModel) -> None:
    if model is teacher:
        raise ValueError("the model is its own teacher, from which it can learn nothing: convert a copy of the teacher")


@torch.no_grad()
def layer_errors(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> dict[int, float]:
    """Return the mean relative error on `batches` of each linearized layer, given its teacher's input, by its index."""
    require_pair(model, teacher)
    require_batches(batches)
    errors: dict[int, list[float]] = {}

    def note(index: int, outputs: LayerOutputs) -> None:
        if outputs.mask is not None and not outputs.mask.any():
            raise ValueError("each batch must have a present token, but one has none")
        errors.setdefault(index, []).append(float(relative_error(*outputs)))

    with evaluating(model):
        for batch in batches:
            compare_layers(model, teacher, batch, note)
    return {index: math.fsum(found) / len(found) for index, found in errors.items()}


class LayerOutputs(NamedTuple):
    """The output `y` of a layer, the `target`, the teacher's for the same input, and the `mask` of present tokens."""

    y: Float[Tensor, "b n d"]
    target: Float[Tensor, "b n d"]
    mask: Bool[Tensor, "b n"] | None


def compare_layers(
    model: PreTrainedModel, teacher: PreTrainedModel, batch: Batch, see: Callable[[int, LayerOutputs], None]
) -> None:
    """Run the teacher once, and each linearized layer on the input of the teacher's layer; call `see` with the index of
    each layer and its outputs, at once. Gradients flow into the layers if they are enabled."""
    gradients = torch.is_grad_enabled()

    def compare(layer: nn.Module, own: LinearizedAttention) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            with torch.set_grad_enabled(gradients):
                y = layer(*args, **options)[0]
                mask = named_arguments(own, args, options).get("attention_mask")
                # the mask of cross-attention is that of the other sequence
                mask = present_keys(mask) if own.spec.dim > 0 else None
                see(own.spec.index, LayerOutputs(y, output[0], mask))

        return hook

    with ExitStack() as stack:
        for name, layer in linearized_layers(model).items():
            hook = compare(layer, own_attention(layer))
            stack.callback(teacher.get_submodule(name).register_forward_hook(hook, with_kwargs=True).remove)
        stack.enter_context(evaluating(teacher))
        stack.enter_context(torch.no_grad())
        run_body(teacher, batch)
