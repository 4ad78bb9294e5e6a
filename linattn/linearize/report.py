"""The report of a conversion: scores and costs of the model, its teacher, and controls that show whether linear
attention has any effect."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from linattn.checks import check_fields, check_numbers, check_sizes, check_types, given
from linattn.linearize.attention import linearized_layers, own_attention
from linattn.linearize.calls import Batch
from linattn.linearize.controls import CONTROLS, controlled, entropies
from linattn.linearize.distance import layer_errors, require_batches
from linattn.linearize.probes import (
    Cost,
    Generated,
    check_needles,
    costs,
    fused_softmax,
    greedy_agreement,
    needles,
    recall,
)
from linattn.linearize.scores import Scores, batch_scores, mean_scores
from linattn.nn.checks import check_indices

BEFORE, SWAPPED, AFTER = "teacher", "swapped in", "linear"
WINDOW, OFF = "window alone", "linear part off"
"""Rows of a report's scores. The last two are controls."""
LEAST_BATCHES = 2
"""A report measures at least so many batches, as a single one has no noise to compare with."""
SCORES_SHARE = 0.5
"""The most of a report's time that its scores take."""


@dataclass(frozen=True)
class Recall:
    """Holds shares of correct predictions of the second half of a passage, at the end of rows of `length` tokens that
    also begin with the passage: by the `model`, the `teacher`, and the model with its `window_alone`. `without` is the
    model's share in rows that do not begin with the passage."""

    length: int
    model: float
    teacher: float
    window_alone: float
    without: float


@dataclass(frozen=True)
class Layer:
    """Holds the relative `error` of a layer on the input of the teacher's layer (None: it stayed softmax), and the
    `entropy` of its attention weights and of the teacher's, in bits."""

    name: str
    error: float | None
    entropy: float
    teacher_entropy: float


@dataclass(frozen=True)
class Report:
    """Holds the measurements of a `model` that was linearized by a `method` with a `window`. `scores` has a row for the
    teacher, the model before its training (*swapped in*) if that was measured, the model, and each control, and
    `layers` one for each attention; `recall`, `generated` and `costs`, pairs of model and teacher, are of language
    models only. `left_out` names the parts that there was no time for."""

    model: str
    method: str
    window: int
    scores: dict[str, Scores]
    layers: tuple[Layer, ...]
    generated: Generated | None = None
    recall: tuple[Recall, ...] = ()
    costs: tuple[tuple[Cost, Cost], ...] = ()
    left_out: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON with all fields and the `sentences()` about them."""
        tables = {name: row._asdict() for name, row in self.scores.items()}
        pairs = [{"model": model._asdict(), "teacher": teacher._asdict()} for model, teacher in self.costs]
        texts = None
        if (found := self.generated) is not None:
            texts = {**found._asdict(), "samples": [sample._asdict() for sample in found.samples]}
        return {**asdict(self), "scores": tables, "generated": texts, "costs": pairs, "sentences": self.sentences()}

    def sentences(self) -> list[str]:
        """Say what the figures mean: first the result, then whether the linear part has any effect."""
        sentences = [self.result(), self.verdict()]
        if SWAPPED in self.scores and (before := self.scores[SWAPPED].loss) is not None:
            sentences.append(f"Before its training, with linear attention swapped in, its loss was {before:.3f} bits.")
        change, noise = _change(self.scores[WINDOW], self.scores[AFTER])
        if change is not None and noise is not None and change <= noise:
            sentences.append(
                f"A window of {self.window or 1} tokens alone does as well, without any training for it: the loss "
                f"changes by {_signed(change, 4)} bits, so this text does not show what linear attention is for."
            )
        if (text := self.generated) is not None:
            sentences.append(f"Greedy texts equal the teacher's for {text.equal:.1f} of {text.tokens} tokens.")
        if failed := [each for each in self.recall if each.teacher < 0.5]:
            shares = ", ".join(f"{100 * each.teacher:.0f} % over {each.length:,} tokens" for each in failed)
            sentences.append(f"The teacher itself fails to recall ({shares}), so this says nothing of the conversion.")
        if self.costs:
            model, teacher = self.costs[-1]
            sentences.append(
                f"After {model.tokens:,} tokens, a token takes {1e3 * model.seconds:.2f} ms, with the cache of keys "
                f"and values {1e3 * teacher.seconds:.2f} ms ({teacher.seconds / model.seconds:.1f} ×); the state has "
                f"{model.bytes:,} bytes, the cache {teacher.bytes:,}."
            )
        if self.left_out:
            sentences.append(f"There was no time for {', '.join(self.left_out)}.")
        return sentences

    def result(self) -> str:
        """Say in one sentence which quality the model has kept."""
        before, after = self.scores[BEFORE], self.scores[AFTER]
        if before.loss is None or after.loss is None:
            return f"The outputs of the linear model have a cosine of {after.cosine:.3f} to the softmax model's."
        share = "" if before.loss == 0 else f"{_signed(100 * (after.loss / before.loss - 1), 1)} % from "
        return (
            f"The linear model has a loss of {after.loss:.3f} bits per prediction, {share}the softmax model's "
            f"{before.loss:.3f}; {100 * (after.agreement or 0):.1f} % of their most likely predictions are the same."
        )

    def verdict(self) -> str:
        """Say whether the linear part matters: the losses of the converted model are compared, batch by batch, with its
        losses when the linear part is switched off. Two standard errors of the differences are noise."""
        change, noise = _change(self.scores[OFF], self.scores[AFTER])
        if change is None:
            moved = _signed(self.scores[OFF].cosine - self.scores[AFTER].cosine, 3)
            return f"The removal of the linear part changes the cosine to the teacher's output by {moved}."
        figures = f"its removal changes the loss by {_signed(change, 4)} bits, and the noise is "
        if noise is None:
            return f"A single batch does not tell whether the linear part matters: {figures}unknown."
        effect = "matters" if change > noise else "does harm" if -change > noise else "does nothing"
        return f"The linear part {effect}: {figures}{noise:.4f}."


def _signed(x: float, digits: int) -> str:
    """Write a change with its sign, or say that it is smaller than the digits show."""
    text = f"{x:+.{digits}f}"
    return f"less than {10**-digits:.{digits}f}" if float(text) == 0 else text


def _change(one: Scores, other: Scores) -> tuple[float | None, float | None]:
    """Return the mean of the losses of `one` minus those of `other`, batch by batch, and two standard errors of this
    mean (None: there is only one batch)."""
    differences = [a - b for a, b in zip(one.losses, other.losses, strict=True)]
    if len(differences) < 2:
        return (differences[0] if differences else None), None
    return statistics.fmean(differences), 2 * statistics.stdev(differences) / math.sqrt(len(differences))


@dataclass(frozen=True)
class Probes:
    """Says how much to measure of a language model; encoders have no probes.

    `prompts` (rows, n) are continued by `new_tokens`. `recall_rows` rows of each of the `recall_lengths` end with a
    passage of 32 tokens of the `text`, which has at least so many more than the longest row. A token is timed after
    each of `cost_lengths`."""

    text: Tensor | None = None
    recall_lengths: Sequence[int] = ()
    recall_rows: int = 16
    prompts: Tensor | None = None
    new_tokens: int = 64
    cost_lengths: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_sizes(recall_rows=self.recall_rows, new_tokens=self.new_tokens, cost_lengths=tuple(self.cost_lengths))
        if self.prompts is not None:
            check_indices(self.prompts, None, name="prompts")
            if not self.prompts.numel():
                raise ValueError(f"prompts must have a token in each row, but are {tuple(self.prompts.shape)}")
        for length in self.recall_lengths:
            if self.text is None:
                raise ValueError("rows to recall from need a text: give Probes one")
            check_needles(self.text, length)


class Clock:
    """Tells how much of `seconds` is left (None: there is no limit)."""

    def __init__(self, seconds: float | None) -> None:
        self.started, self.seconds = time.monotonic(), math.inf if seconds is None else seconds
        self.per_token = 0.0

    def left(self) -> float:
        return self.started + self.seconds - time.monotonic()

    def calibrate(self, tokens: int) -> None:
        """Note that one model has read so many `tokens` since the start."""
        self.per_token = (time.monotonic() - self.started) / tokens

    def suffices(self, tokens: int) -> bool:
        """Return whether there is time for one model to read so many tokens, as fast as those before."""
        return self.per_token * tokens < self.left()


@check_types
def report(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Sequence[Batch],
    probes: Probes | None = None,
    *,
    swapped_in: Scores | None = None,
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Measure a linearized model and its teacher on held-out batches and by `probes`. `progress` gets stages' names.

    `swapped_in` are the model's `scores` before its training, for comparison. With `seconds`, the report ends about
    then: it takes fewer batches, two at least, and leaves out the probes that there is no time for."""
    check_numbers(**given(seconds=seconds))
    probes = Probes() if probes is None else probes
    linear = linearized_layers(model)
    if not linear:
        raise ValueError("the model has no linearized layer to report on: convert it first")
    require_batches(batches)
    clock, left_out = Clock(seconds), []

    def affordable(part: str, tokens: int) -> bool:
        """Announce the part, or note that it is left out, by the tokens that models read for it."""
        if not clock.suffices(tokens):
            left_out.append(part)
            return False
        progress(part)
        return True

    progress("scores")
    table = _scores(model, teacher, batches, clock)
    if swapped_in is not None:
        table = {BEFORE: table.pop(BEFORE), SWAPPED: swapped_in, **table}
    text, layers, recalls, pairs = None, (), [], []
    if (prompts := probes.prompts) is not None and affordable(
        "generated text", 2 * (prompts.numel() + len(prompts) * probes.new_tokens)
    ):
        text = greedy_agreement(model, teacher, prompts, tokens=probes.new_tokens)
    if affordable("layers", 4 * _count(batches[0])):
        layers = _layers(model, teacher, batches)
    for length in probes.recall_lengths:
        if affordable(f"recall over {length:,} tokens", 4 * probes.recall_rows * length):
            recalls.append(_recall(model, teacher, probes, length))
    for tokens in probes.cost_lengths:
        if affordable(f"a token after {tokens:,}", 2 * tokens):
            with fused_softmax(teacher):
                pairs.append(tuple(costs([model, teacher], tokens)))
    spec = own_attention(next(iter(linear.values()))).spec
    found = (table, layers, text, tuple(recalls), tuple(pairs), tuple(left_out))
    return Report(type(teacher).__name__, spec.method, spec.window, *found)


def _scores(
    model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch], clock: Clock
) -> dict[str, Scores]:
    """Return the scores of the teacher, the model and the controls, of as many batches as there is time for."""
    rows = {name: [] for name in (BEFORE, AFTER, *CONTROLS)}
    for place, batch in enumerate(batches):
        if place >= LEAST_BATCHES and clock.left() < (1 - SCORES_SHARE) * clock.seconds:
            break
        for name, found in rows.items():
            with controlled(model, CONTROLS[name]) if name in CONTROLS else nullcontext():
                found.append(batch_scores(teacher if name == BEFORE else model, teacher, batch))
        clock.calibrate(2 * len(rows) * sum(map(_count, batches[: place + 1])))
    return {name: mean_scores(found) for name, found in rows.items()}


def _count(batch: Batch) -> int:
    """Return rows times columns of the batch's tensor that has most of them: a language model's number of tokens."""
    return max(math.prod(x.shape[:2]) for x in batch.values() if isinstance(x, Tensor))


def _layers(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> tuple[Layer, ...]:
    before, after = entropies(teacher, batches[0]), entropies(model, batches[0])
    errors = layer_errors(model, teacher, batches[:1])
    known = {name: errors[own_attention(layer).spec.index] for name, layer in linearized_layers(model).items()}
    return tuple(Layer(name, known.get(name), after[name], bits) for name, bits in before.items() if name in after)


def _recall(model: PreTrainedModel, teacher: PreTrainedModel, probes: Probes, length: int) -> Recall:
    assert probes.text is not None
    rows, without = (needles(probes.text, length, rows=probes.recall_rows, known=known) for known in (True, False))
    with controlled(model, CONTROLS[WINDOW]):
        window = recall(model, rows)
    return Recall(length, recall(model, rows), recall(teacher, rows), window, recall(model, without))
