"""Scores of a linearized model beside its teacher: loss, divergence, agreement and the angle of the outputs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from linattn.integrations.transformers.linearize.distance import IGNORED, predicts_next, with_labels
from linattn.integrations.transformers.linearize.observe import Batch, evaluating, run


class Scores(NamedTuple):
    """Means over the places where something is predicted, in bits and shares of 1; None where the model has no such
    output. `losses` are those of each batch."""

    loss: float | None
    accuracy: float | None
    kl: float | None
    agreement: float | None
    cosine: float
    losses: tuple[float, ...]


def scores(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> Scores:
    """Measure the model, and how close its output is to the teacher's: KL divergence from the teacher, the share of
    places with the same most likely class, and the cosine of the output vectors."""
    if not batches:
        raise ValueError("scores need at least one batch")
    with evaluating(model), evaluating(teacher):
        found = [_batch_scores(*outputs(model, batch), outputs(teacher, batch)[0]) for batch in batches]
    counts = [count for count, _ in found]
    means = [
        None if values[0] is None else math.fsum(map(_times, counts, values)) / sum(counts)
        for values in zip(*(figures for _, figures in found), strict=True)
    ]
    losses = tuple(figures[0] for _, figures in found if figures[0] is not None)
    return Scores(means[0], means[1], means[2], means[3], means[4] or 0.0, losses)


def _times(count: int, value: float | None) -> float:
    return count * (value or 0.0)


def _batch_scores(y: Tensor, labels: Tensor | None, target: Tensor) -> tuple[int, tuple[float | None, ...]]:
    """Return the number of places, and loss, accuracy, KL, agreement and cosine there."""
    cosine = float(F.cosine_similarity(y, target, dim=-1).mean())
    if labels is None:
        return len(y), (None, None, None, None, cosine)
    log_p, log_t = y.log_softmax(-1), target.log_softmax(-1)
    loss = float(F.nll_loss(log_p, labels)) / math.log(2)
    kl = float((log_t.exp() * (log_t - log_p)).sum(-1).mean()) / math.log(2)
    best = y.argmax(-1)
    return len(y), (loss, _share(best == labels), kl, _share(best == target.argmax(-1)), cosine)


def _share(right: Tensor) -> float:
    return float(right.double().mean())


def outputs(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return the output vectors (places, c) in float32 or better where something is predicted, with the labels there;
    of a model without logits or without labels, the vectors of all present tokens, and None."""
    output = run(model, batch)
    y = output["logits"] if "logits" in output else output["last_hidden_state"]
    y = y if y.dtype == torch.float64 else y.float()
    labels = with_labels(model, batch).get("labels") if "logits" in output else None
    if labels is not None and y.shape[: labels.dim()] == labels.shape:
        if predicts_next(model):
            y, labels = y[:, :-1], labels[:, 1:]
        asked = labels != IGNORED
        return y[asked], labels[asked]
    mask = batch.get("attention_mask")
    return (y[mask.bool()] if mask is not None and mask.shape == y.shape[:2] else y.flatten(0, -2)), None
