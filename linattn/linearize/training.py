"""The training loop of a conversion: Muon on batches in their order, within a budget of steps or minutes.

A checkpoint is complete before it gets its name, so a training that was killed resumes from the last one."""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from linattn.checks import check_fields, check_numbers, check_sizes, given
from linattn.console.learning_rate import learning_rate_factor
from linattn.console.muon import Muon
from linattn.console.processes import from_first
from linattn.console.sharded_tensors import distributed_as
from linattn.files import atomic_file
from linattn.linearize.calls import Batch
from linattn.linearize.distance import Diverged, require_batches, require_pair
from linattn.linearize.processes import (
    broadcast,
    own_batches,
    process_count,
    process_rank,
    require_group,
    sum_gradients,
    sum_over_processes,
)
from linattn.linearize.sharding import on_first, sharded
from linattn.linearize.trained_weights import float32_weights, trainable, without_dropout
from linattn.nn.modes import evaluating

Add = Callable[[Tensor], None]
Objective = Callable[[PreTrainedModel, Batch, Add], int]
"""Computes the sum of a model's losses over a batch, calls its last argument with each part of the sum, and returns the
number of losses. The gradients of a part are computed at once, so that only one part needs memory for them."""

Figures = Mapping[str, float]

WARMUP = 0.1
"""The share of a training in which the learning rates rise: full steps at once would undo what is near already."""
CHECKPOINT = "checkpoint.pt"


class Progress(NamedTuple):
    """The number of the last `step`, of how many `steps` (None: time decides), its `loss`, the `seconds_left`, and the
    `figures` that the budget's `validate` has returned after this step."""

    step: int
    steps: int | None
    loss: float
    seconds_left: float
    figures: Figures


@dataclass(frozen=True)
class Budget:
    """Limits a training to `steps`, to `minutes`, or to whichever ends first. The batches repeat if they are fewer.

    Each step takes the gradient of the mean loss over `accumulate` batches. With a `folder`, a checkpoint is written
    there every `save_every` steps, and training resumes from the last one. Each training needs a folder of its own.
    `report` is called after each step.

    `validate` is called with the model in training every `save_every` steps and after the last one, and returns figures
    by name, such as scores on batches that the training does not read. Its time does not count.

    In a group of processes, each reads `accumulate` batches of its own per step, and the loss is the mean over all of
    them. All processes call `validate` and `report`. With `shard`, each holds only a part of the weights that train, of
    their gradients and of the optimizer's states; after an error the model has no weights, and a new one resumes from
    the checkpoint. The first process writes the checkpoints, which all read."""

    steps: int | None = None
    minutes: float | None = None
    folder: str | os.PathLike[str] | None = None
    save_every: int = 500
    accumulate: int = 1
    shard: bool = False
    report: Callable[[Progress], None] | None = None
    validate: Callable[[PreTrainedModel], Figures] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is None and self.minutes is None:
            raise ValueError("give steps, minutes or both, or training would not end")
        check_sizes(save_every=self.save_every, accumulate=self.accumulate, **given(steps=self.steps))
        check_numbers(**given(minutes=self.minutes))
        if self.minutes == 0:
            raise ValueError("minutes must be above 0, but are 0")
        if self.shard and process_count() == 1:
            raise ValueError("shard distributes weights over several processes, but there is one")

    def progress(self, steps: float, seconds: float) -> float:
        """Return the share of the budget, from 0 to 1, that so many `steps` and `seconds` use up."""
        return min(1.0, max(steps / (self.steps or math.inf), seconds / 60 / (self.minutes or math.inf)))


@dataclass(frozen=True)
class Training:
    """Holds the `losses` of all steps of a training, its `seconds`, and the figures of its `validations` by step, those
    before an interruption included."""

    losses: tuple[float, ...]
    seconds: float
    validations: Mapping[int, Figures] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.losses)


def check_training(model: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> None:
    """Raise ValueError if the model cannot train, or not with this teacher or on these batches."""
    require_pair(model, teacher)
    require_batches(batches)
    require_group()
    if any(weight.dtype == torch.float16 for weight in model.parameters()):
        raise ValueError("AdamW's steps overflow in float16: train the model in float32 or bfloat16")


def train(
    model: PreTrainedModel,
    objective: Objective,
    batches: Sequence[Batch],
    groups: list[dict[str, Any]],
    budget: Budget,
    *,
    full_steps: float = 1.0,
) -> Training:
    """Minimize the objective by `Muon` over `groups` of weights with their peak learning rates, which rise linearly and
    then fall along half a cosine; if there are fewer steps than `full_steps`, the peaks are lower in proportion. Other
    weights do not change. There is no dropout or other noise, as there is none in the teacher.

    The groups' weights in bfloat16 are float32 until the training ends, as bfloat16 has no room for small steps; the
    model then computes in bfloat16, by autocast."""
    weights = [weight for group in groups for weight in group["params"]]
    broadcast([weight.data for weight in weights])
    with ExitStack() as stack:
        stack.enter_context(trainable(model, weights))
        autocast = stack.enter_context(float32_weights(weights))
        # this restores the modes at the end; a model that trains may recompute its activations
        stack.enter_context(evaluating(model))
        stack.enter_context(without_dropout(model.train()))
        if budget.shard:
            model, groups = stack.enter_context(sharded(model, groups))
        return _Trainer(model, groups, budget, full_steps).train(objective, batches, autocast)


class _Trainer:
    """A training in progress: the optimizer of a model, and the `losses`, `seconds` and `validations` so far."""

    def __init__(self, model: PreTrainedModel, groups: list[dict[str, Any]], budget: Budget, full_steps: float) -> None:
        self.model, self.budget, self.full_steps = model, budget, full_steps
        self.weights = [weight for group in groups for weight in group["params"]]
        self.peaks = [group["lr"] for group in groups]
        self.optimizer = Muon(groups, betas=(0.9, 0.99), weight_decay=0.0, **_fused(self.weights))
        self.losses, self.seconds, self.validations = _resume(model, self.optimizer, budget.folder)

    def train(self, objective: Objective, batches: Sequence[Batch], autocast: AbstractContextManager[Any]) -> Training:
        while self.budget.progress(len(self.losses), self.seconds) < 1:
            started, step = time.monotonic(), len(self.losses)
            self._set_rates()
            self.optimizer.zero_grad()
            with autocast:
                own = own_batches(batches, range(step, step + 1), self.budget.accumulate)
                self.losses.append(_gradients(self.model, objective, own, self.weights))
            if not math.isfinite(self.losses[-1]):
                raise Diverged(
                    f"the loss is not finite at step {len(self.losses)}: lower the learning rate, which begins at "
                    f"{max(self.peaks):g}"
                )
            clip_grad_norm_(self.weights, 1.0)
            self.optimizer.step()
            # the clocks of processes differ
            (self.seconds,) = from_first([self.seconds + time.monotonic() - started])
            self._finish_step(autocast)
        return Training(tuple(self.losses), self.seconds, self.validations)

    def _set_rates(self) -> None:
        steps = len(self.losses) + 0.5
        # the progress in the middle of the step: at its begin, the first learning rate would be zero
        progress = self.budget.progress(steps, self.seconds)
        factor = learning_rate_factor(progress, WARMUP)
        if progress > 0:
            # with a budget in minutes, the number of steps follows from the time of those so far
            factor *= min(1.0, steps / progress / self.full_steps)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = factor * peak

    def _finish_step(self, autocast: AbstractContextManager[Any]) -> None:
        """Validate and write a checkpoint if they are due, and report the progress."""
        budget, step, share = self.budget, len(self.losses), self.budget.progress(len(self.losses), self.seconds)
        due, figures = share == 1 or step % budget.save_every == 0, {}
        if due and budget.validate is not None:
            with autocast:
                found = budget.validate(self.model)
            # numbers of other packages, such as numpy's, could not be read from a checkpoint
            figures = self.validations[step] = {name: float(x) for name, x in found.items()}
        if due and budget.folder is not None:
            record = {"losses": self.losses, "seconds": self.seconds, "validations": self.validations}
            _write_checkpoint(budget.folder, self.model, self.optimizer, record)
        if budget.report is not None:
            left = self.seconds * (1 - share) / share
            budget.report(Progress(step, budget.steps, self.losses[-1], left, figures))


def _gradients(
    model: PreTrainedModel, objective: Objective, batches: Iterable[Batch], weights: Sequence[nn.Parameter]
) -> float:
    """Compute the gradients of the mean loss over the batches of all processes, and return this mean."""
    losses: list[Tensor] = []

    def add(part: Tensor) -> None:
        backward(part)
        losses.append(part.detach())

    count = sum(objective(model, batch, add) for batch in batches)
    total, count = sum_over_processes(torch.stack(losses).sum().item(), count)
    if count == 0:
        raise ValueError("the batches of an update must have a present token, but have none")
    sum_gradients(weights)
    for weight in weights:
        if weight.grad is not None:
            weight.grad /= count
    return total / count


def backward(y: Tensor, gradient: Tensor | None = None) -> None:
    """Compute gradients in the precision of the forward pass, without autocast."""
    with torch.autocast(y.device.type, enabled=False):
        y.backward(gradient)


def _fused(weights: Sequence[nn.Parameter]) -> dict[str, bool]:
    """Return AdamW's option for a GPU, where its default needs memory for one more copy of all weights."""
    return {"fused": True} if all(weight.is_cuda for weight in weights) else {}


def _write_checkpoint(
    folder: str | os.PathLike[str], model: PreTrainedModel, optimizer: Muon, record: dict[str, Any]
) -> None:
    """Write a checkpoint of what trains and of the record of the training, in the first process."""
    weights = {name: on_first(x) for name, x in _trained_weights(model).items()}
    state = {"weights": weights, "optimizer": tree_map(on_first, optimizer.state_dict())}
    if process_rank() == 0:
        with atomic_file(Path(folder) / CHECKPOINT) as file:
            _save({**state, **record}, file)


def _trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state without the weights that do not train."""
    fixed = {name for name, x in model.named_parameters(remove_duplicate=False) if not x.requires_grad}
    return {name: x for name, x in model.state_dict().items() if name not in fixed}


def _sizes(weights: Mapping[str, Tensor]) -> set[str]:
    return {f"{name} {tuple(x.shape)}" for name, x in weights.items()}


def _save(checkpoint: dict[str, Any], path: Path) -> None:
    """Save a checkpoint. Raises OSError where torch raises RuntimeError, such as "unexpected pos", on a full disk."""
    try:
        torch.save(checkpoint, path)
    except RuntimeError as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"a checkpoint could not be written to {path.parent}, which has {free:,} bytes free") from error


def saved_steps(folder: Path) -> int:
    """Return the number of steps before the last checkpoint in the folder, 0 if there is none."""
    checkpoint = _last_checkpoint(folder)
    return 0 if checkpoint is None else len(checkpoint["losses"])


def _last_checkpoint(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the checkpoint in the folder, None if there is none. Raises ValueError if it cannot be read."""
    if not (path := Path(folder) / CHECKPOINT).exists():
        return None
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {name: checkpoint[name] for name in ("weights", "optimizer", "losses", "seconds", "validations")}
    # torch has no error of its own for a damaged file
    except (OSError, RuntimeError, UnpicklingError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no checkpoint, or a damaged one: delete it to begin anew ({error})") from error


def _resume(model: PreTrainedModel, optimizer: Muon, folder: Any) -> tuple[list[float], float, dict[int, Figures]]:
    """Load the checkpoint in the folder, if there is one, and return the losses, seconds and validations before it.

    Raises ValueError, before a weight changes, if the checkpoint is of a training with other weights, and OSError if
    there can be no such folder."""
    if folder is not None:
        # before the training, whose first steps would be lost
        Path(folder).mkdir(parents=True, exist_ok=True)
    if folder is None or (checkpoint := _last_checkpoint(folder)) is None:
        return [], 0.0, {}
    weights, known = checkpoint["weights"], _trained_weights(model)
    if different := sorted(_sizes(weights) ^ _sizes(known)):
        raise ValueError(
            f"{folder} has the checkpoint of a training with other weights, such as {different[0]}: give each training "
            f"a folder of its own, or delete {CHECKPOINT} there to begin anew"
        )
    weights = {name: distributed_as(x, known[name]) for name, x in weights.items()}
    model.load_state_dict(weights, strict=False)
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, states in checkpoint["optimizer"]["state"].items():
        states.update((name, distributed_as(x, trained[number])) for name, x in states.items())
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["losses"], checkpoint["seconds"], checkpoint["validations"]
