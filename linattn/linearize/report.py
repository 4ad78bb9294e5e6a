"""The report of a conversion: what it cost and what it kept, beside controls that show whether linear attention does
anything at all."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linattn.linearize.controls import CONTROLS, controlled, entropies
from linattn.linearize.distance import layer_errors
from linattn.linearize.observe import Batch
from linattn.linearize.parts import linearized_layers, own_attention
from linattn.linearize.probes import (
    Cost,
    Generated,
    costs,
    generated,
    native,
    needles,
    recalled,
)
from linattn.linearize.scores import Scores, scores

BEFORE, AFTER, WINDOW, OFF = "teacher", "linear", "window alone", "linear part off"
"""Rows of a report's scores. The last two are controls."""


@dataclass(frozen=True)
class Recall:
    """The share of a passage's second half that is predicted, at the end of rows of `length` tokens that begin with the
    same passage: by the model, the teacher, and the model with its window alone; and by the model if they do not."""

    length: int
    model: float
    teacher: float
    window_alone: float
    without: float


@dataclass(frozen=True)
class Layer:
    """A layer's attention: its relative error given the teacher's own input (None: it stayed softmax), and the entropy
    of its weights in bits."""

    name: str
    error: float | None
    entropy: float
    teacher_entropy: float


@dataclass(frozen=True)
class Report:
    """Holds the measurements of a `model` that was linearized by a `method` with a `window`. `scores` has a row for the
    teacher, the model, and each control, and `layers` one for each attention; `recall`, `generated` and `costs`, pairs
    of model and teacher, are of language models only."""

    model: str
    method: str
    window: int
    scores: dict[str, Scores]
    layers: tuple[Layer, ...]
    generated: Generated | None = None
    recall: tuple[Recall, ...] = ()
    costs: tuple[tuple[Cost, Cost], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them, with the sentences."""
        tables = {name: row._asdict() for name, row in self.scores.items()}
        pairs = [{"model": model._asdict(), "teacher": teacher._asdict()} for model, teacher in self.costs]
        made = None if self.generated is None else self.generated._asdict()
        return {**asdict(self), "scores": tables, "generated": made, "costs": pairs, "sentences": self.sentences()}

    def sentences(self) -> list[str]:
        """Say what the figures mean, and above all whether the linear part does anything."""
        found = [self.verdict()]
        change, noise = _paired(self.scores[WINDOW], self.scores[AFTER])
        if change is not None and noise is not None and change <= noise:
            found.append(
                f"A window of {self.window or 1} tokens alone does as well, without any training for it: the loss "
                f"changes by {change:+.4f} bits, so this text does not show what linear attention is for."
            )
        if self.generated is not None:
            found.append(
                f"Greedy texts equal the teacher's for {self.generated.equal:.1f} of {self.generated.tokens} tokens."
            )
        if self.costs:
            model, teacher = self.costs[-1]
            found.append(
                f"After {model.tokens:,} tokens, a token takes {1e3 * model.seconds:.2f} ms, with the cache of keys "
                f"and values {1e3 * teacher.seconds:.2f} ms ({teacher.seconds / model.seconds:.1f} ×); the state has "
                f"{model.bytes:,} bytes, the cache {teacher.bytes:,}."
            )
        return found

    def verdict(self) -> str:
        """Compare the model with its linear part switched off, batch by batch: the noise is two standard errors."""
        change, noise = _paired(self.scores[OFF], self.scores[AFTER])
        if change is None:
            lost = self.scores[AFTER].cosine - self.scores[OFF].cosine
            return f"Without its linear part, the cosine to the teacher's output falls by {lost:.3f}."
        told = f"its removal changes the loss by {change:+.4f} bits, and the noise is "
        told += "unknown" if noise is None else f"{noise:.4f}"
        if noise is None:
            return f"A single batch does not tell whether the linear part matters: {told}."
        if abs(change) <= noise:
            return f"The linear part does nothing: {told}."
        return f"The linear part {'matters' if change > 0 else 'does harm'}: {told}."


def _paired(one: Scores, other: Scores) -> tuple[float | None, float | None]:
    """Return the mean difference of the losses, and two standard errors of it, which a single batch does not have."""
    differences = [a - b for a, b in zip(one.losses, other.losses, strict=True)]
    if len(differences) < 2:
        return (differences[0] if differences else None), None
    return statistics.fmean(differences), 2 * statistics.stdev(differences) / math.sqrt(len(differences))


@dataclass(frozen=True)
class Probes:
    """Says how much to measure of a language model: `new_tokens` after each of the `prompts` (rows, n); the recall of
    passages of the `text`, at the end of `recall_rows` rows of each of `recall_lengths`; and the time of a token after
    each of `cost_lengths`. The text holds more tokens than the longest row. Encoders have none of it."""

    text: Tensor | None = None
    recall_lengths: Sequence[int] = ()
    recall_rows: int = 16
    prompts: Tensor | None = None
    new_tokens: int = 64
    cost_lengths: Sequence[int] = ()


def report(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Sequence[Batch],
    probes: Probes | None = None,
    *,
    progress: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Measure a linearized model beside its teacher on held-out batches, and what the `probes` ask for. `progress` is
    called with each stage."""
    probes = Probes() if probes is None else probes
    layers = linearized_layers(model)
    if not layers:
        raise ValueError("the model has no linearized layer to report on: convert it first")
    progress("scores")
    table = {BEFORE: scores(teacher, teacher, batches), AFTER: scores(model, teacher, batches)}
    for name, control in CONTROLS.items():
        with controlled(model, control):
            table[name] = scores(model, teacher, batches)
    progress("layers")
    made = _layers(model, teacher, batches)
    text, recall, pairs = None, [], []
    if probes.prompts is not None:
        progress("generated text")
        text = generated(model, teacher, probes.prompts, tokens=probes.new_tokens)
    for length in probes.recall_lengths:
        progress(f"recall over {length:,} tokens")
        recall.append(_recall(model, teacher, probes, length))
    for tokens in probes.cost_lengths:
        progress(f"a token after {tokens:,}")
        with native(teacher), torch.no_grad():
            pairs.append(tuple(costs([model, teacher], tokens)))
    spec = own_attention(next(iter(layers.values()))).spec
    return Report(type(teacher).__name__, spec.method, spec.window, table, made, text, tuple(recall), tuple(pairs))


def _layers(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> tuple[Layer, ...]:
    before, after = entropies(teacher, batches[0]), entropies(model, batches[0])
    errors = layer_errors(model, teacher, batches[:1])
    known = {name: errors[own_attention(layer).spec.index] for name, layer in linearized_layers(model).items()}
    return tuple(
        Layer(name, known.get(name), after[name], entropy) for name, entropy in before.items() if name in after
    )


def _recall(model: PreTrainedModel, teacher: PreTrainedModel, probes: Probes, length: int) -> Recall:
    if probes.text is None:
        raise ValueError("rows to recall from need a text: give Probes one")
    rows, without = (needles(probes.text, length, rows=probes.recall_rows, known=known) for known in (True, False))
    with controlled(model, CONTROLS[WINDOW]):
        window = recalled(model, rows)
    return Recall(length, recalled(model, rows), recalled(teacher, rows), window, recalled(model, without))
