"""The Trainer of a run: complete checkpoints of finite weights, and each sequence counted once."""

import math
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PrinterCallback, TrainingArguments

from linattn.cli.checkpoints import adopt_checkpoint
from linattn.cli.options import TrainOptions
from linattn.cli.reports import Reports
from linattn.cli.run_folder import Run
from linattn.cli.schedule import Schedule, largest
from linattn.cli.sharded_checkpoints import OPTIMIZER, load_optimizer, load_weights, save_optimizer, save_weights
from linattn.cli.sharing import Sharing, align_random_numbers, group_size, sequences_per_update
from linattn.console.errors import CommandError, writing
from linattn.console.muon import Muon, language_model_groups
from linattn.console.processes import average_gradients, reported_by_first
from linattn.data.windows import (
    RepeatedBatches,
    TrainingWindows,
    WindowChains,
    count_turns,
    padded,
    validation_windows,
)
from linattn.distributed import sequence_loss, split_sequence
from linattn.integrations.transformers import StatefulTrainer
from linattn.models.loss import NO_LABEL

SCHEDULER = "scheduler.pt"


def training_windows(run: Run, options: TrainOptions, *, sequences: int) -> TrainingWindows | WindowChains:
    """Return the windows of all updates, each of so many `sequences`."""
    tokens, context, length = run.tokens("training"), options.context, options.limit() * sequences
    if (share := options.carry) is None:
        return TrainingWindows(tokens, context, seed=options.seed, length=length)
    rows = sequences * count_turns(len(tokens) // context, sequences)
    return WindowChains(tokens, context, seed=options.seed, length=length, rows=rows, share=share)


class RunTrainer(StatefulTrainer):
    """Saves complete checkpoints of finite weights, and takes the learning rate from the schedule."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        options: TrainOptions,
        args: TrainingArguments,
        sharing: Sharing,
    ) -> None:
        self.run, self.keep, self.sharing = run, options.keep, sharing
        self.muon = options.optimizer == "muon"
        self.sequences_per_step = sequences_per_update(options, args.world_size)
        self.schedule = Schedule(steps=options.limit(), minutes=options.minutes, warmup=options.warmup)
        tokens_per_step = self.sequences_per_step * (options.context - 1)
        self.reports = Reports(run, self.schedule, options.track, tokens_per_step=tokens_per_step)
        windows = training_windows(run, options, sequences=self.sequences_per_step)
        self.rows = windows.rows if isinstance(windows, WindowChains) else None
        most = math.ceil(options.evaluate_tokens / options.context)
        validated = validation_windows(run.tokens("validation"), options.context, most=most)
        ranks, self.labels_per_evaluation = group_size(options), 0.0
        if args.world_size > 1:
            count = len(validated)
            validated = padded(validated, per_call := options.batch * (args.world_size // ranks))
            self.labels_per_evaluation = ranks * count * (options.context - 1) * per_call / len(validated)
        super().__init__(
            model,
            args,
            train_dataset=RepeatedBatches(windows, options.batch, ranks),
            eval_dataset=RepeatedBatches(validated, options.batch, ranks),
            callbacks=[self.schedule, self.reports],
        )
        # our callback reports instead
        self.remove_callback(PrinterCallback)
        if sharing.is_sharded:
            # with autocast, but without DDP
            prepared: Any = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
            prepared._is_accelerate_prepared = True

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of the batch, times the share of its labels in those of the update.

        In a validation by several processes, the share is that of a mean call's labels, so that the mean over all calls
        is the mean over all labels."""
        if not model.training and self.labels_per_evaluation:
            num_items_in_batch = torch.tensor(self.labels_per_evaluation, device=self.args.device)
        if self.sharing.sequence is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert num_items_in_batch is not None
        group = self.sharing.sequence.line.group
        part = split_sequence(inputs["input_ids"], inputs["labels"], group=group)
        outputs = model(input_ids=part.tokens, use_cache=False)
        # labels were counted on each process, once per part of the sequence
        share = (inputs["labels"][:, 1:] != NO_LABEL).sum() * self.args.world_size / num_items_in_batch
        loss = sequence_loss(outputs.logits, part.labels, group=group) * share
        return (loss, outputs) if return_outputs else loss

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, weight in model.named_parameters() if weight.ndim > 1]

    def create_optimizer(self, model: Any = None) -> Any:
        if self.muon and self.optimizer is None:
            args, trained = self.args, model or cast(Any, self.model)
            options = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
            betas = args.adam_beta1, args.adam_beta2
            groups = language_model_groups(trained, trained.model.get_stack())
            self.optimizer = Muon(groups, betas=betas, fused=True, **options)
        return super().create_optimizer(model)

    @property
    def _parts(self) -> tuple[Any, Any]:
        """The model, and torch's own optimizer."""
        return self.model, getattr(self.optimizer, "optimizer", self.optimizer)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        loss = super().training_step(*arguments, **options)
        if self.sharing.averages is not None and self.accelerator.sync_gradients:
            average_gradients(self._parts[0].parameters(), self.sharing.averages)
        return loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        if self.lr_scheduler is None:
            used: Any = optimizer or self.optimizer
            # a plain function, because the scheduler would save the attributes of any other callable, methods too
            self.lr_scheduler = LambdaLR(used, lambda step: self.schedule.learning_rate_factor(step))
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Raise if a loss is not finite; every process passes every loss through this method."""
        if not all(math.isfinite(logs.get(name, 0.0)) for name in ("loss", "eval_loss")):
            self._end_diverged("the loss is")
        super().log(logs, start_time)

    def _end_diverged(self, what: str) -> NoReturn:
        saved, clip = self.run.saved_steps(), self.args.max_grad_norm
        kept = f"the checkpoint of step {saved[-1]:,} is kept" if saved else "there is no checkpoint yet"
        clipping = f"a smaller --clip (it was {clip:g})" if clip else "with --clip 1, which limits the gradient"
        message = (
            f"training has diverged: {what} not finite at step {self.state.global_step:,}; {kept}. "
            f"Begin again with a lower --lr (it was {self.args.learning_rate:g}) or {clipping}"
        )
        with reported_by_first(self.args.process_index):
            raise CommandError(message, status=1)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let all processes write under another name, and rename the complete checkpoint at the end."""
        if largest(float(not is_finite(model)), device=self.args.device) != [0.0]:
            self._end_diverged("the weights are")
        step = self.state.global_step
        with writing(self.run.checkpoint(step)):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                adopt_checkpoint(self.run, Path(self._get_output_dir(trial)) / f"checkpoint-{step}", step, self.keep)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.sharing.is_sharded:
            return super().save_model(output_dir, _internal_call)
        assert output_dir is not None
        save_weights(self._parts[0], Path(output_dir), first=self.is_world_process_zero())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharing.is_sharded:
            return super()._save_optimizer_and_scheduler(output_dir)
        save_optimizer(*self._parts, Path(output_dir))
        if self.is_world_process_zero():
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.sharing.is_sharded:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_weights(self._parts[0], Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (self.sharing.is_sharded or (Path(checkpoint) / OPTIMIZER).exists()):
            return super()._load_optimizer_and_scheduler(checkpoint)
        load_optimizer(*self._parts, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self.sharing.layers is not None:
            # a process that was not there before has no file
            align_random_numbers(self.sharing.layers)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.sharing.is_sharded:
            super()._move_model_to_device(model, device)


def is_finite(model: nn.Module) -> bool:
    """Tell whether all weights are finite. If the model is sharded, each process checks its own part of the weights."""
    weights = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters())
    return all(bool(weight.isfinite().all()) for weight in weights)
