"""Train a run with transformers' Trainer, which provides the loop, DDP, FSDP2 and mixed precision.

Every process builds the model, the data and the Trainer; the first one writes files."""

import argparse
import math
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from linattn.cli.checkpoints import adopt_checkpoint, last_step, recover
from linattn.cli.memory import require_activations, require_weights
from linattn.cli.options import TrainOptions
from linattn.cli.prepare import create_run
from linattn.cli.reports import Reports, draw_curve
from linattn.cli.run_folder import Run, open_run, require_free
from linattn.cli.schedule import Schedule, largest
from linattn.cli.vocabulary import Vocabulary
from linattn.cli.windows import TrainingWindows, open_tokens, validation_windows
from linattn.console.atomic import partial_name, remove_leftovers
from linattn.console.errors import CommandError, explained, one_line, writing
from linattn.console.lock import locked
from linattn.console.machine import timestamp
from linattn.integrations.transformers import LinattnConfig, LinattnForCausalLM


def train(arguments: argparse.Namespace, options: TrainOptions, vocabulary: Vocabulary) -> None:
    """Train after checking everything that can be wrong, so that a failing command leaves no folder."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.set_seed(options.seed)
    with explained("no such model", ValueError):
        config = options.language_model(vocabulary.size)
        separator = vocabulary.separator
        own = LinattnConfig(language_model=config, bos_token_id=separator, eos_token_id=separator)
        require_weights(partial(LinattnForCausalLM, own), options)
        model = LinattnForCausalLM(own)
    with explained("this cannot be run here", ValueError, ImportError):
        args = training_arguments(options, arguments.out)
    require_activations(model, options, args)
    model.segment_length = options.segment
    with ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(locked(arguments.out))
            if not arguments.resume:
                # another process may have begun a run since this was checked first
                require_free(arguments.out, replace=arguments.replace)
                create_run(arguments.out, arguments.data, options, vocabulary, processes=args.world_size)

        _first_process_only(args, arguments.out, begin)
        _train(open_run(arguments.out), model, options, args)


def _first_process_only(args: TrainingArguments, out: Path, action: Callable[[], None]) -> None:
    """Run the action, which writes `out`, in the first process while the others wait; if it fails, all end."""
    failure: list[str | None] = [None]
    if args.process_index == 0:
        try:
            with writing(out):
                action()
        except (CommandError, OSError) as error:
            failure = [one_line(error)]
    broadcast_object_list(failure)
    if failure[0] is not None:
        raise CommandError(failure[0]) if args.process_index == 0 else SystemExit(2)


def _train(run: Run, model: PreTrainedModel, options: TrainOptions, args: TrainingArguments) -> None:
    if args.world_size != (began := run.description["processes"]):
        raise CommandError(f"the run began with {began} processes, so it cannot go on with {args.world_size}")
    trainer, step = RunTrainer(run, model, options, args), last_step(run)
    if first := trainer.is_world_process_zero():
        recover(run, step, options.keep)
        _announce(run, model, options, trainer.sequences_per_step * options.context, step)
    try:
        with trainer.schedule.saves_on_interrupt():
            trainer.train(resume_from_checkpoint=str(run.checkpoint(step)) if step else None)
        trainer.accelerator.wait_for_everyone()
    finally:
        trainer.reports.close()
        if first:
            remove_leftovers(run.checkpoints)
    if first:
        draw_curve(run.records(), run.curve)
    if trainer.schedule.must_stop:
        saved, command = (
            trainer.state.global_step,
            shlex.join(["linattn", "train", "--resume", "--out", str(run.folder)]),
        )
        raise CommandError(f"interrupted after step {saved:,}, which is saved; {command} goes on", status=130)
    if first:
        run.describe(finished=timestamp())
        command = shlex.join(["linattn", "generate", str(run.folder)])
        print(f"{run.folder} is complete: {command} --prompt … writes with it", file=sys.stderr)


def _announce(run: Run, model: PreTrainedModel, options: TrainOptions, tokens_per_step: int, step: int) -> None:
    facts = [
        f"{run.folder}: {model.num_parameters():,} parameters",
        *(f"{part['bytes'] / 1e6:.2f} MB for {name}" for name, part in run.description["data"].items()),
        f"{tokens_per_step:,} tokens per step",
        f"{options.limit():,} steps" if options.minutes is None else f"{options.minutes:g} minutes",
        *([f"from step {step:,}"] if step else []),
    ]
    print(", ".join(facts), file=sys.stderr)


def can_shard(args: TrainingArguments) -> bool:
    """Tell whether FSDP2 would shard. On CPUs Accelerate silently copies the model."""
    return args.world_size > 1 and args.device.type != "cpu"


def training_arguments(options: TrainOptions, folder: Path) -> TrainingArguments:
    """Make the Trainer's arguments, and with them join the other processes, if there are any."""
    use_cpu = options.cpu or not torch.accelerator.is_available()
    bfloat16 = options.precision == "bfloat16" or (options.precision == "auto" and _multiplies_bfloat16(use_cpu))
    args = TrainingArguments(
        output_dir=str(partial_name(folder / "checkpoints" / "checkpoint")),
        max_steps=options.limit(),
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.lr,
        weight_decay=options.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=options.clip,
        activation_checkpointing=options.checkpointing,
        seed=options.seed,
        use_cpu=use_cpu,
        bf16=bfloat16,
        # a bool works, whatever the type says
        fsdp=options.fsdp,  # pyright: ignore[reportArgumentType]
        fsdp_config={"version": 2} if options.fsdp else None,
        eval_strategy="steps",
        eval_steps=options.evaluate_every,
        save_steps=options.save_every,
        logging_steps=options.log_every,
        # report a loss that is not finite as it is
        logging_nan_inf_filter=False,
        # the datasets shuffle themselves, so that window i does not depend on the number of processes
        train_sampling_strategy="sequential",
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        log_level="error",
    )
    for other in ("checkpointing", "fsdp"):
        if options.segment is not None and getattr(options, other):
            raise ValueError(f"--segment does not work with --{other}")
    if options.fsdp and not can_shard(args):
        raise ValueError(
            f"--fsdp needs several processes with a GPU each, but there are {args.world_size} on {args.device.type}"
        )
    return args


def _multiplies_bfloat16(use_cpu: bool) -> bool:
    """Tell whether the machine multiplies bfloat16 natively: a step then takes 0.6 to 0.8 of its time in float32."""
    if use_cpu:
        return any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


class RunTrainer(Trainer):
    """Saves complete checkpoints of finite weights, and takes the learning rate from the schedule."""

    def __init__(self, run: Run, model: nn.Module, options: TrainOptions, args: TrainingArguments) -> None:
        self.run, self.keep = run, options.keep
        self.sequences_per_step = options.batch * options.accumulate * args.world_size
        self.schedule = Schedule(steps=options.limit(), minutes=options.minutes, warmup=options.warmup)
        self.reports = Reports(run, self.schedule, tokens_per_step=self.sequences_per_step * (options.context - 1))
        training, validation = open_tokens(run, "training"), open_tokens(run, "validation")
        length, most = options.limit() * self.sequences_per_step, math.ceil(options.evaluate_tokens / options.context)
        super().__init__(
            model,
            args,
            train_dataset=TrainingWindows(training, options.context, seed=options.seed, length=length),
            # a list is a dataset, whatever the type says
            eval_dataset=validation_windows(validation, options.context, most=most),  # pyright: ignore[reportArgumentType]
            callbacks=[self.schedule, self.reports, GatherTiedEmbeddings()],
        )
        # our callback reports instead
        self.remove_callback(PrinterCallback)
        if (plugin := getattr(self.accelerator.state, "fsdp_plugin", None)) is not None:
            # a run's weights are in one file, which loads on any machine, whatever Accelerate's configuration says
            plugin.set_state_dict_type("FULL_STATE_DICT")

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
