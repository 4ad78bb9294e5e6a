"""The Trainer of a run: complete checkpoints of finite weights, and each sequence counted once."""

import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from linattn.cli.checkpoints import adopt_checkpoint
from linattn.cli.muon import muon_for
from linattn.cli.options import TrainOptions
from linattn.cli.processes import sequences_per_update
from linattn.cli.reports import Reports
from linattn.cli.run_folder import Run
from linattn.cli.schedule import Schedule, largest
from linattn.console.errors import CommandError, writing
from linattn.data.windows import (
    RepeatedBatches,
    TrainingWindows,
    WindowChains,
    count_turns,
    padded,
    validation_windows,
)
from linattn.distributed import SequenceSharding, sequence_loss, split_sequence
from linattn.integrations.transformers import StatefulTrainer
from linattn.models.loss import NO_LABEL


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
        sharding: SequenceSharding | None = None,
    ) -> None:
        self.run, self.keep, self.muon = run, options.keep, options.optimizer == "muon"
        self.group = None if sharding is None else sharding.line.group
        self.sequences_per_step = sequences_per_update(options, args.world_size)
        self.schedule = Schedule(steps=options.limit(), minutes=options.minutes, warmup=options.warmup)
        self.reports = Reports(run, self.schedule, tokens_per_step=self.sequences_per_step * (options.context - 1))
        windows = training_windows(run, options, sequences=self.sequences_per_step)
        self.rows = windows.rows if isinstance(windows, WindowChains) else None
        most = math.ceil(options.evaluate_tokens / options.context)
        validated = validation_windows(run.tokens("validation"), options.context, most=most)
        ranks, self.labels_per_evaluation = options.sequence_parallel, 0.0
        if args.world_size > 1:
            count = len(validated)
            validated = padded(validated, per_call := options.batch * (args.world_size // ranks))
            self.labels_per_evaluation = ranks * count * (options.context - 1) * per_call / len(validated)
        super().__init__(
            model,
            args,
            train_dataset=RepeatedBatches(windows, options.batch, ranks),
            eval_dataset=RepeatedBatches(validated, options.batch, ranks),
            callbacks=[self.schedule, self.reports, GatherTiedEmbeddings()],
        )
        # our callback reports instead
        self.remove_callback(PrinterCallback)
        if (plugin := getattr(self.accelerator.state, "fsdp_plugin", None)) is not None:
            # a run's weights are in one file, which loads on any machine, whatever Accelerate's configuration says
            plugin.set_state_dict_type("FULL_STATE_DICT")

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
        if self.group is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert num_items_in_batch is not None
        part = split_sequence(inputs["input_ids"], inputs["labels"], group=self.group)
        outputs = model(input_ids=part.tokens, use_cache=False)
        # labels were counted on each process, once per part of the sequence
        share = (inputs["labels"][:, 1:] != NO_LABEL).sum() * self.args.world_size / num_items_in_batch
        loss = sequence_loss(outputs.logits, part.labels, group=self.group) * share
        return (loss, outputs) if return_outputs else loss

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [name for name, weight in model.named_parameters() if weight.ndim > 1]

    def create_optimizer(self, model: Any = None) -> Any:
        if self.muon and self.optimizer is None:
            args, trained = self.args, model or cast(Any, self.model)
            options = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
            betas = args.adam_beta1, args.adam_beta2
            self.optimizer = muon_for(trained, trained.model.get_stack(), betas=betas, fused=True, **options)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        if self.lr_scheduler is None:
            used: Any = optimizer or self.optimizer
            # a plain function, because the scheduler would save the attributes of any other callable, methods too
            self.lr_scheduler = LambdaLR(used, lambda step: self.schedule.learning_rate_factor(step))
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Raise if a loss is not finite; every process passes every loss through this method."""
        if not all(math.isfinite(logs.get(name, 0.0)) for name in ("loss", "eval_loss")):
            raise self._diverged("the loss is")
        super().log(logs, start_time)

    def _diverged(self, what: str) -> CommandError:
        saved, clip = self.run.saved_steps(), self.args.max_grad_norm
        kept = f"the checkpoint of step {saved[-1]:,} is kept" if saved else "there is no checkpoint yet"
        clipping = f"a smaller --clip (it was {clip:g})" if clip else "with --clip 1, which limits the gradient"
        return CommandError(
            f"training has diverged: {what} not finite at step {self.state.global_step:,}; {kept}. "
            f"Begin again with a lower --lr (it was {self.args.learning_rate:g}) or {clipping}",
            status=1,
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let all processes write under another name, and rename the complete checkpoint at the end."""
        if largest(float(not is_finite(model)), device=self.args.device) != [0.0]:
            raise self._diverged("the weights are")
        step = self.state.global_step
        with writing(self.run.checkpoint(step)):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                adopt_checkpoint(self.run, Path(self._get_output_dir(trial)) / f"checkpoint-{step}", step, self.keep)
        self.accelerator.wait_for_everyone()


def is_finite(model: nn.Module) -> bool:
    """Tell whether all weights are finite. If the model is sharded, each process checks its own part of the weights."""
    weights = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters())
    return all(bool(weight.isfinite().all()) for weight in weights)


class GatherTiedEmbeddings(TrainerCallback):
    """Keeps tied embeddings gathered for the logits, where FSDP2 would free them after the embeddings' own forward."""

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        for module in kwargs["model"].modules():
            if isinstance(module, nn.Embedding) and isinstance(module, FSDPModule):
                module.set_reshard_after_forward(False)
