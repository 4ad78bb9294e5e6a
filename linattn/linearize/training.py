"""The training loop of a conversion: AdamW on batches in their order, within a budget of steps or minutes.

A checkpoint is complete before it gets its name, so a training that was killed resumes from the last one."""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel

from linattn.checks import check_fields, check_numbers, check_sizes, given
from linattn.console.learning_rate import learning_rate_factor
from linattn.files import atomic_file
from linattn.linearize.calls import Batch
from linattn.linearize.distance import Diverged, require_batches
from linattn.nn.modes import evaluating

Add = Callable[[Tensor], None]
Objective = Callable[[PreTrainedModel, Batch, Add], None]
"""Computes the loss of a model on a batch, and calls its last argument with each part of the loss. The gradients of a
part are computed at once, so that only one part needs memory for them."""

WARMUP = 0.1
"""The share of a training in which the learning rates rise: full steps at once would undo what is near already."""
CHECKPOINT = "checkpoint.pt"


class Progress(NamedTuple):
    """The number of the last `step`, of how many `steps` (None: time decides), its `loss`, and the `seconds_left`."""

    step: int
    steps: int | None
    loss: float
    seconds_left: float


@dataclass(frozen=True)
class Budget:
    """Limits a training to `steps`, to `minutes`, or to whichever ends first. The batches repeat if they are fewer.

    Each step takes the mean gradient of `accumulate` batches. With a `folder`, a checkpoint is written there every
    `save_every` steps, and training resumes from the last one. `report` is called after each step."""

    steps: int | None = None
    minutes: float | None = None
    folder: str | os.PathLike[str] | None = None
    save_every: int = 500
    accumulate: int = 1
    report: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is None and self.minutes is None:
            raise ValueError("give steps, minutes or both, or training would not end")
        check_sizes(save_every=self.save_every, accumulate=self.accumulate, **given(steps=self.steps))
        check_numbers(**given(minutes=self.minutes))
        if self.minutes == 0:
            raise ValueError("minutes must be above 0, but are 0")

    def progress(self, steps: float, seconds: float) -> float:
        """Return the share of the budget, from 0 to 1, that so many `steps` and `seconds` use up."""
        return min(1.0, max(steps / (self.steps or math.inf), seconds / 60 / (self.minutes or math.inf)))


@dataclass(frozen=True)
class Training:
    """Holds the `losses` of all steps of a training and its `seconds`, those before an interruption included."""

    losses: tuple[float, ...]
    seconds: float

    @property
    def steps(self) -> int:
        return len(self.losses)


def train(
    model: PreTrainedModel,
    objective: Objective,
    batches: Sequence[Batch],
    groups: list[dict[str, Any]],
    budget: Budget,
    *,
    full_steps: float = 1.0,
) -> Training:
    """Minimize the objective by AdamW over `groups` of weights with their peak learning rates, which rise linearly and
    then fall along half a cosine; if there are fewer steps than `full_steps`, the peaks are lower in proportion. Other
    weights do not change. There is no dropout, as there is none in the teacher.

    The groups' weights in bfloat16 are float32 until the training ends, as bfloat16 has no room for small steps; the
    model then computes in bfloat16, by autocast."""
    require_batches(batches)
    weights = [weight for group in groups for weight in group["params"]]
    if any(weight.dtype == torch.float16 for weight in weights):
        raise ValueError("AdamW's steps overflow in float16: train the model in float32 or bfloat16")
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(f"a conversion trains in one process, but there are {processes}: use no launcher")
    peaks = [group["lr"] for group in groups]
    optimizer = AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0, **_fused(weights))
    with ExitStack() as stack:
        stack.enter_context(trainable(model, weights))
        autocast = stack.enter_context(float32_weights(weights))
        # this restores the modes at the end; a model that trains may recompute its activations
        stack.enter_context(evaluating(model))
        stack.enter_context(without_dropout(model.train()))
        losses, seconds = _resume(model, optimizer, budget.folder)
        while budget.progress(len(losses), seconds) < 1:
            started = time.monotonic()
            # the progress in the middle of the step: at its begin, the first learning rate would be zero
            progress = budget.progress(len(losses) + 0.5, seconds)
            factor = learning_rate_factor(progress, WARMUP)
            if progress > 0:
                # with a budget in minutes, the number of steps follows from the time of those so far
                factor *= min(1.0, (len(losses) + 0.5) / progress / full_steps)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = factor * peak
            optimizer.zero_grad()
            first = budget.accumulate * len(losses)
            numbers = range(first, first + budget.accumulate)
            with autocast:
                losses.append(_gradients(model, objective, [batches[i % len(batches)] for i in numbers]))
            if not math.isfinite(losses[-1]):
                raise Diverged(
                    f"the loss is not finite at step {len(losses)}: lower the learning rate, which begins at "
                    f"{max(peaks):g}"
                )
            clip_grad_norm_(weights, 1.0)
            optimizer.step()
            seconds += time.monotonic() - started
            _finish_step(model, optimizer, budget, losses, seconds)
        return Training(tuple(losses), seconds)


def _gradients(model: PreTrainedModel, objective: Objective, batches: Sequence[Batch]) -> float:
    """Add the gradients of the mean loss over the batches to those of the weights, and return this loss."""
    losses: list[Tensor] = []

    def add(part: Tensor) -> None:
        backward(part / len(batches))
        losses.append(part.detach() / len(batches))

    for batch in batches:
        objective(model, batch, add)
    return torch.stack(losses).sum().item()


def backward(y: Tensor, gradient: Tensor | None = None) -> None:
    """Compute gradients in the precision of the forward pass, without autocast."""
    with torch.autocast(y.device.type, enabled=False):
        y.backward(gradient)


def _fused(weights: Sequence[nn.Parameter]) -> dict[str, bool]:
    """Return AdamW's option for a GPU, where its default needs memory for one more copy of all weights."""
    return {"fused": True} if all(weight.is_cuda for weight in weights) else {}


@contextmanager
def float32_weights(weights: Sequence[nn.Parameter]) -> Iterator[AbstractContextManager[Any]]:
    """Convert weights in bfloat16 to float32 inside the block, and yield the context in which their model computes in
    bfloat16 as before."""
    half = [weight for weight in weights if weight.dtype == torch.bfloat16]
    if not half:
        yield nullcontext()
        return
    try:
        for weight in half:
            weight.data = weight.data.float()
        # a cache would keep a copy of every weight until the end of the step
        yield torch.autocast(half[0].device.type, torch.bfloat16, cache_enabled=False)
    finally:
        for weight in half:
            weight.grad = None
            weight.data = weight.data.bfloat16()


def _finish_step(model: PreTrainedModel, optimizer: AdamW, budget: Budget, losses: list[float], seconds: float) -> None:
    """Write a checkpoint if one is due, and report the progress."""
    step, share = len(losses), budget.progress(len(losses), seconds)
    if budget.folder is not None and (share == 1 or step % budget.save_every == 0):
        fixed = {name for name, x in model.named_parameters(remove_duplicate=False) if not x.requires_grad}
        weights = {name: x for name, x in model.state_dict().items() if name not in fixed}
        Path(budget.folder).mkdir(parents=True, exist_ok=True)
        with atomic_file(Path(budget.folder) / CHECKPOINT) as file:
            state = {"weights": weights, "optimizer": optimizer.state_dict(), "losses": losses, "seconds": seconds}
            _save(state, file)
    if budget.report is not None:
        budget.report(Progress(step, budget.steps, losses[-1], seconds * (1 - share) / share))


def _save(checkpoint: dict[str, Any], path: Path) -> None:
    """Save a checkpoint. Raises OSError where torch raises RuntimeError, such as "unexpected pos", on a full disk."""
    try:
        torch.save(checkpoint, path)
    except RuntimeError as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"a checkpoint could not be written to {path.parent}, which has {free:,} bytes free") from error


def _resume(model: PreTrainedModel, optimizer: AdamW, folder: Any) -> tuple[list[float], float]:
    """Load the checkpoint in the folder, if there is one, and return the losses and seconds of the steps before it."""
    if folder is None or not (path := Path(folder) / CHECKPOINT).exists():
        return [], 0.0
    checkpoint = torch.load(path, map_location=model.device, weights_only=True)
    # weights that do not train are not there
    model.load_state_dict(checkpoint["weights"], strict=False)
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["losses"], checkpoint["seconds"]


@contextmanager
def trainable(model: nn.Module, weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Give gradients to these weights alone inside the block."""
    before = {weight: weight.requires_grad for weight in model.parameters()}
    try:
        model.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for weight in model.parameters():
            weight.requires_grad_(before.get(weight, True))
            weight.grad = None


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every rate of dropout to zero inside the block, of layers and of modules that call torch's function."""
    rates = [
        (module, name, rate)
        for module in model.modules()
        for name, rate in vars(module).items()
        if isinstance(rate, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout)))
    ]
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)
