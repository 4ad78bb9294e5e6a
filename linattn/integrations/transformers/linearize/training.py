"""The training loop of a conversion: transformers' Trainer on batches as they are, with an objective of ours.

A checkpoint is complete before it gets its name, so a run that is killed at any instant goes on from the last one."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from linattn.checks import check_numbers, check_sizes, given
from linattn.integrations.transformers.linearize.distance import Diverged, require_batches
from linattn.integrations.transformers.linearize.observe import Batch, keeping_modes
from linattn.integrations.transformers.schedule import Schedule

Objective = Callable[[PreTrainedModel, Batch], Tensor]
"""The loss of a model on a batch."""

WARMUP = 0.1
"""The share of a training in which the learning rates rise: full steps at once would undo what is near already."""
# a limit for runs that end by time
MOST_STEPS = 10**9


class Progress(NamedTuple):
    """Tells which `step` is done, of how many `steps` (None: the time decides), with what `loss`, and the
    `seconds_left`."""

    step: int
    steps: int | None
    loss: float
    seconds_left: float


@dataclass(frozen=True)
class Budget:
    """Limits a training to `steps`, to `minutes`, or to what ends first. The batches repeat if they are fewer.

    With a `folder`, a checkpoint is written there every `save_every` steps, and training goes on from the last one.
    `report` is called after each step."""

    steps: int | None = None
    minutes: float | None = None
    folder: str | os.PathLike[str] | None = None
    save_every: int = 500
    report: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("give steps, minutes or both, or training would not end")
        check_sizes(save_every=self.save_every, **given(steps=self.steps))
        check_numbers(**given(minutes=self.minutes))
        if self.minutes == 0:
            raise ValueError("minutes must be above 0, but are 0")


@dataclass(frozen=True)
class Training:
    """Records a training: the `losses` of its steps, those before an interruption included, and the `seconds`."""

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
) -> Training:
    """Minimize the objective by AdamW over `groups` of weights with their peak learning rates, which rise linearly and
    then fall along half a cosine. Dropout is off: the targets are the teacher's without it. Only the weights of the
    groups change."""
    require_batches(batches)
    if any(weight.dtype == torch.float16 for group in groups for weight in group["params"]):
        raise ValueError("AdamW's steps overflow in float16: train the model in float32 or bfloat16")
    with ExitStack() as stack:
        folder = budget.folder or stack.enter_context(TemporaryDirectory())
        stack.enter_context(only_training(model, [weight for group in groups for weight in group["params"]]))
        stack.enter_context(keeping_modes(model))
        stack.enter_context(without_dropout(model))
        trainer = _ObjectiveTrainer(model, objective, batches, groups, budget, Path(folder))
        trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if Path(folder).is_dir() else None)
        losses = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        return Training(tuple(losses), trainer.schedule.seconds)


@contextmanager
def only_training(model: nn.Module, weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let gradients flow into these weights alone."""
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
    """Set every rate of dropout to zero: of layers, and of modules that call torch's function."""
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


class _ObjectiveTrainer(Trainer):
    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        batches: Sequence[Batch],
        groups: list[dict[str, Any]],
        budget: Budget,
        folder: Path,
    ):
        self.objective, self.groups, self.budget, self.folder = objective, groups, budget, folder
        steps = budget.steps or MOST_STEPS
        self.schedule = Schedule(steps=steps, minutes=budget.minutes, warmup=WARMUP)
        super().__init__(
            model,
            _arguments(model, budget, folder, steps),
            data_collator=itemgetter(0),
            train_dataset=cast(Dataset[Batch], batches),
            callbacks=[self.schedule],
        )
        self.remove_callback(PrinterCallback)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        return self.objective(model, inputs)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Do nothing at the end of the time: measuring is the caller's."""
        return {}

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = AdamW(self.groups, betas=(0.9, 0.99), weight_decay=0.0)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        # a plain function, because the scheduler would save the attributes of any other callable
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: self.schedule.learning_rate_factor(step))
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        step, loss = self.state.global_step, logs.get("loss")
        if loss is not None and not math.isfinite(loss):
            raise Diverged(
                f"the loss is not finite at step {step}: lower the learning rate, which begins at "
                f"{max(group['lr'] for group in self.groups):g}"
            )
        super().log(logs, start_time)
        if loss is not None and self.budget.report is not None:
            done = self.schedule.progress(step)
            left = self.schedule.seconds * (1 - done) / done
            self.budget.report(Progress(step, self.budget.steps, loss, left))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write under another name, and rename the complete checkpoint."""
        name = f"checkpoint-{self.state.global_step}"
        self.args.output_dir = str(self.folder / "unfinished")
        super()._save_checkpoint(model, trial)
        os.replace(self.folder / "unfinished" / name, self.folder / name)
        self.args.output_dir = str(self.folder)


def _arguments(model: PreTrainedModel, budget: Budget, folder: Path, steps: int) -> TrainingArguments:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,
        max_grad_norm=1.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no" if budget.folder is None else "steps",
        save_steps=budget.save_every,
        save_total_limit=2,
        use_cpu=next(model.parameters()).device.type == "cpu",
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        log_level="error",
    )
    if args.world_size > 1:
        raise ValueError(f"a conversion trains in one process, but there are {args.world_size}: use no launcher")
    # copies of the model on other devices would not be the one whose layers the objectives look into
    args._n_gpu = min(args.n_gpu, 1)
    return args
