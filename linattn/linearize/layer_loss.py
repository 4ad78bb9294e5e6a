"""The loss of `transfer`: squared errors of layers' outputs, as shares of the squared deviations of the teacher's.

The deviations are from the mean over the tokens of the first update, so that the loss is a sum over tokens: it does not
depend on how an update is cut into batches, or distributed over processes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from linattn.linearize.calls import Batch
from linattn.linearize.distance import LayerOutputs, compare_layers
from linattn.linearize.predictions import accurate, aligned_labels
from linattn.linearize.processes import gather
from linattn.models.loss import NO_LABEL
from linattn.nn.modes import evaluating


class Moments(NamedTuple):
    """The `number` of vectors, their `mean`, and the sum of the `squares` of their deviations from it."""

    number: int
    mean: Float[Tensor, " d"]
    squares: float


def moments(x: Float[Tensor, "tokens d"]) -> Moments:
    """Return the moments of vectors in float64, on the CPU."""
    x = x.detach().cpu().double()
    mean = x.mean(0) if len(x) else x.new_zeros(x.shape[1])
    return Moments(len(x), mean, float((x - mean).square().sum()))


def squared_deviations(parts: Sequence[Moments]) -> float:
    """Return the sum of the squared deviations of all vectors from their common mean; where it is zero, as for a single
    vector, return their number of elements."""
    counts = torch.tensor([part.number for part in parts], dtype=torch.float64)
    means = torch.stack([part.mean for part in parts])
    mean = counts @ means / counts.sum()
    found = sum(part.squares for part in parts) + float(counts @ (means - mean).square().sum(1))
    return found or float(counts.sum()) * len(mean)


class ErrorWeights(NamedTuple):
    """The factor of a layer's squared errors, and what is added to it at tokens with labels."""

    everywhere: float
    labeled: float


@torch.no_grad()
def error_weights(
    model: PreTrainedModel, teacher: PreTrainedModel, batches: Iterable[Batch]
) -> dict[int, ErrorWeights]:
    """Return weights, by the layer's index, that make the mean over tokens and layers of the weighted squared errors on
    the `batches` of all processes the mean of the layers' relative errors.

    Where only some tokens have labels, half of a layer's error is that at these tokens, which would otherwise count
    little."""
    found: dict[int, tuple[list[Moments], list[Moments]]] = {}
    for batch in batches:

        def note(index: int, outputs: LayerOutputs, batch: Batch = batch) -> None:
            everywhere, labeled = found.setdefault(index, ([], []))
            everywhere.append(moments(_select(outputs.target, outputs.mask)))
            if (labels := _labeled(model, batch, outputs.target)) is not None:
                labeled.append(moments(outputs.target[labels]))

        with evaluating(model):
            compare_layers(model, teacher, batch, note)
    processes = gather(found)
    tokens = sum(part.number for each in processes for parts, _ in each.values() for part in parts)
    weights = {}
    for index in found:
        everywhere, labeled = ([part for each in processes for part in each[index][kind]] for kind in (0, 1))
        factor, labeled = tokens / len(found), [part for part in labeled if part.number]
        if labeled:
            factor /= 2
        at_labels = factor / squared_deviations(labeled) if labeled else 0.0
        weights[index] = ErrorWeights(factor / squared_deviations(everywhere), at_labels)
    return weights


def error_sum(
    model: PreTrainedModel, batch: Batch, outputs: LayerOutputs, weights: ErrorWeights
) -> tuple[Float[Tensor, ""], int]:
    """Return the sum of the weighted squared errors of a layer's `outputs`, and the number of tokens."""
    y = _select(outputs.y, outputs.mask)
    total = weights.everywhere * squared_error(y, _select(outputs.target, outputs.mask))
    if weights.labeled and (labels := _labeled(model, batch, outputs.target)) is not None:
        total = total + weights.labeled * squared_error(outputs.y[labels], outputs.target[labels])
    return total, len(y)


def squared_error(y: Float[Tensor, "*b d"], target: Float[Tensor, "*b d"]) -> Float[Tensor, ""]:
    return (accurate(y) - accurate(target)).square().sum()


def _select(x: Float[Tensor, "b n d"], mask: Tensor | None) -> Float[Tensor, "tokens d"]:
    return x.flatten(0, -2) if mask is None else x[mask]


def _labeled(model: PreTrainedModel, batch: Batch, target: Tensor) -> Tensor | None:
    """Return where the batch has labels for tokens; None if it has labels for rows, or none."""
    labels = None if model.config.is_encoder_decoder else aligned_labels(model, batch, target)
    return None if labels is None else labels != NO_LABEL
