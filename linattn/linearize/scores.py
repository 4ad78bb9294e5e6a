"""Scores of a linearized model beside its teacher: loss, divergence, agreement and the angle of the outputs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from linattn.linearize.distance import (
    IGNORED,
    NOTHING_ASKED,
    Diverged,
    aligned_labels,
    main_output,
    present_tokens,
    require_batches,
    with_labels,
)
from linattn.linearize.observe import Batch, evaluating, run


class Scores(NamedTuple):
    """Holds means over the places where something is predicted: `loss` and `kl`, the divergence from the teacher, in
    bits, `accuracy` and `agreement` with the teacher as shares of 1, and the `cosine` of the output vectors. None
    stands where the model has no such output. `losses` are those of each batch."""

    loss: float | None
    accuracy: float | None
    kl: float | None
    agreement: float | None
    cosine: float
    losses: tuple[float, ...]


def scores(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> Scores:
    """Measure the model on the `batches`, and how close its output is to the teacher's."""
    require_batches(batches)
    with evaluating(model), evaluating(teacher):
        found = [_batch_scores(*outputs(model, batch), outputs(teacher, batch)[0]) for batch in batches]
    total = sum(n for n, _ in found)
    means = {name: math.fsum(n * figures[name] for n, figures in found) / total for name in found[0][1]}
    losses = tuple(figures["loss"] for _, figures in found if "loss" in figures)
    loss, accuracy, kl, agreement = (means.get(name) for name in ("loss", "accuracy", "kl", "agreement"))
    return Scores(loss, accuracy, kl, agreement, means["cosine"], losses)


def _batch_scores(y: Tensor, labels: Tensor | None, target: Tensor) -> tuple[int, dict[str, float]]:
    """Return the number of places, and the scores there."""
    if not len(y):
        raise ValueError(NOTHING_ASKED)
    found = {"cosine": F.cosine_similarity(y, target, dim=-1)}
    if labels is not None:
        log_p, log_t, best = y.log_softmax(-1), target.log_softmax(-1), y.argmax(-1)
        found["loss"] = F.nll_loss(log_p, labels, reduction="none") / math.log(2)
        found["accuracy"], found["agreement"] = best == labels, best == target.argmax(-1)
        found["kl"] = (log_t.exp() * (log_t - log_p)).sum(-1) / math.log(2)
    means = {name: float(values.double().mean()) for name, values in found.items()}
    if not all(map(math.isfinite, means.values())):
        raise Diverged(f"the outputs on a held-out batch are not finite: {means}")
    return len(y), means


def outputs(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return the output vectors (places, c) in float32 or better where something is predicted, with the labels there;
    of a model without logits or without labels, the vectors of all present tokens, and None."""
    output = run(model, batch)
    y = main_output(output)
    y = y if y.dtype == torch.float64 else y.float()
    labels = aligned_labels(model, with_labels(model, batch), y) if "logits" in output else None
    if labels is not None:
        return y[labels != IGNORED], labels[labels != IGNORED]
    mask = present_tokens(batch, y)
    return (y.flatten(0, -2) if mask is None else y[mask]), None
