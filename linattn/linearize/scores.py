"""Scores of a linearized model beside its teacher: loss, divergence, agreement and the angle of the outputs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from linattn.linearize.calls import Batch
from linattn.linearize.distance import Diverged, require_batches
from linattn.linearize.predictions import pieces, predict, with_labels
from linattn.nn.modes import evaluating


class Scores(NamedTuple):
    """Holds means over all predictions of the batches: the `loss`, and the divergence `kl` from the teacher, in bits;
    `accuracy`, and `agreement` with the teacher's most likely predictions, as shares of 1; and the `cosine` between the
    output vectors. None stands for a score that the model does not have. `losses` has the loss of each batch."""

    loss: float | None
    accuracy: float | None
    kl: float | None
    agreement: float | None
    cosine: float
    losses: tuple[float, ...]


BatchScores = tuple[int, dict[str, float]]
"""The number of predictions on a batch, and the means of their scores."""


def scores(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> Scores:
    """Measure the model on the `batches`, and how close its output is to the teacher's."""
    require_batches(batches)
    return mean_scores([batch_scores(model, teacher, batch) for batch in batches])


@torch.no_grad()
def batch_scores(model: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> BatchScores:
    """Measure the model on one batch."""
    labeled = with_labels(model, batch)
    with evaluating(model), evaluating(teacher):
        found, target = (predict(each, labeled, inputs=batch) for each in (model, teacher))
        parts = [_sums(y, labels, expected) for y, expected, labels in pieces(found, target)]
    means = {name: math.fsum(part[name] for part in parts) / len(target.vectors) for name in parts[0]}
    if not all(map(math.isfinite, means.values())):
        raise Diverged(f"the outputs on a held-out batch are not finite: {means}")
    return len(target.vectors), means


def mean_scores(rows: Sequence[BatchScores]) -> Scores:
    """Return the mean of each score over all predictions; `rows` has the scores of each batch."""
    total = sum(count for count, _ in rows)
    means = {name: math.fsum(count * row[name] for count, row in rows) / total for name in rows[0][1]}
    losses = tuple(row["loss"] for _, row in rows if "loss" in row)
    loss, accuracy, kl, agreement = (means.get(name) for name in ("loss", "accuracy", "kl", "agreement"))
    return Scores(loss, accuracy, kl, agreement, means["cosine"], losses)


def _sums(y: Tensor, labels: Tensor | None, target: Tensor) -> dict[str, float]:
    """Return the sums of the scores over places: of predictions y beside `labels` and `target`, the teacher's."""
    columns = {"cosine": F.cosine_similarity(y, target, dim=-1)}
    if labels is not None:
        log_p, log_t, best = y.log_softmax(-1), target.log_softmax(-1), y.argmax(-1)
        columns["loss"] = F.nll_loss(log_p, labels, reduction="none") / math.log(2)
        columns["accuracy"], columns["agreement"] = best == labels, best == target.argmax(-1)
        columns["kl"] = (log_t.exp() * (log_t - log_p)).sum(-1) / math.log(2)
    return {name: float(column.double().sum()) for name, column in columns.items()}
