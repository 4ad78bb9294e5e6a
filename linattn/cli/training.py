"""Train a run with transformers' Trainer, which provides the loop, DDP, FSDP2 and mixed precision.

Every process builds the model, the data and the Trainer; the first one writes files."""

import argparse
import os
import shlex
import sys
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import torch
import transformers
from transformers import TrainingArguments

from linattn.cli.checkpoints import last_step, recover
from linattn.cli.memory import require_activations, require_weights
from linattn.cli.options import TrainOptions, recorded_options
from linattn.cli.prepare import create_run
from linattn.cli.reports import draw_curve
from linattn.cli.run_folder import Run, open_run, require_free
from linattn.cli.sharing import Sharing, check_sharing, sequences_per_update, share, with_updates_of
from linattn.cli.trainer import RunTrainer
from linattn.cli.vocabulary import Vocabulary
from linattn.console.atomic import partial_name, remove_leftovers
from linattn.console.errors import CommandError, explained
from linattn.console.lock import locked
from linattn.console.machine import timestamp
from linattn.console.processes import (
    end_after_loss,
    first_process_only,
    has_lost_process,
    is_restart,
    join_processes,
    must_join,
    rank,
    reported_by_first,
)
from linattn.console.trackers import check_trackers
from linattn.integrations.transformers import LinattnConfig, LinattnForCausalLM
from linattn.integrations.transformers.own_model.stateful_trainer import require_continuation


def train(arguments: argparse.Namespace, options: TrainOptions, vocabulary: Vocabulary) -> None:
    """Train after checking everything that can be wrong, so that a failing command leaves no folder."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.set_seed(options.seed)
    with reported_by_first(rank()):
        model, args, sharing = _prepare(arguments, options, vocabulary)
    with ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(locked(arguments.out))
            if not arguments.resume:
                # another process may have begun a run since this was checked first
                require_free(arguments.out, replace=arguments.replace)
                create_run(arguments.out, arguments.data, options, vocabulary, processes=args.world_size)

        first_process_only(args.process_index, arguments.out, begin)
        run = open_run(arguments.out)
        began, processes = recorded_options(run.description["options"]), run.description["processes"]
        sequences, given = sequences_per_update(began, processes), vars(arguments).get("accumulate")
        with reported_by_first(args.process_index):
            options = with_updates_of(options, sequences, args.world_size, given)
        args.gradient_accumulation_steps = options.accumulate
        _train(run, model, options, args, sharing)


def _prepare(
    arguments: argparse.Namespace, options: TrainOptions, vocabulary: Vocabulary
) -> tuple[LinattnForCausalLM, TrainingArguments, Sharing]:
    """Make the model, join the other processes, and let them share it."""
    with explained("no such model", ValueError):
        config = options.language_model(vocabulary.size)
        separator = vocabulary.separator
        own = LinattnConfig(language_model=config, bos_token_id=separator, eos_token_id=separator)
        require_weights(partial(LinattnForCausalLM, own), options)
        model = LinattnForCausalLM(own)
    with explained("this cannot be run here", ValueError, ImportError):
        check_trackers(options.track)
        if options.carry is not None:
            require_continuation(model.model, "--carry")
        if is_restart() and must_join():
            join_processes(cpu=options.cpu)
        args = training_arguments(options, arguments.out)
        require_activations(model, options, args)
        model.segment_length = options.segment
        return model, args, share(model, options, args)


def _train(
    run: Run, model: LinattnForCausalLM, options: TrainOptions, args: TrainingArguments, sharing: Sharing
) -> None:
    trainer, step = RunTrainer(run, model, options, args, sharing), last_step(run)
    resume = shlex.join(["linattn", "train", "--resume", "--out", str(run.folder)])
    if first := trainer.is_world_process_zero():
        recover(run, step, options.keep)
        facts = [*_facts(run, options, trainer.sequences_per_step * options.context), *sharing.facts]
        facts += [f"from step {step:,}"] if step else []
        print(f"{run.folder}: {model.num_parameters():,} parameters, {', '.join(facts)}", file=sys.stderr)
    try:
        with trainer.schedule.saves_on_interrupt():
            trainer.train(resume_from_checkpoint=str(run.checkpoint(step)) if step else None)
        trainer.accelerator.wait_for_everyone()
    except RuntimeError as error:
        if not has_lost_process(error):
            raise
        saved = (run.saved_steps() or [0])[-1]
        message = f"another process of the run has ended, and so does this one; {resume} goes on from step {saved:,}"
        raise end_after_loss(args.process_index, run.folder, message) from error
    finally:
        trainer.reports.close()
        if first:
            remove_leftovers(run.checkpoints)
    if first:
        draw_curve(run.records(), run.curve)
    if trainer.schedule.must_stop:
        saved = trainer.state.global_step
        with reported_by_first(args.process_index):
            raise CommandError(f"interrupted after step {saved:,}, which is saved; {resume} goes on", status=130)
    if first:
        run.describe(finished=timestamp())
        command = shlex.join(["linattn", "generate", str(run.folder)])
        print(f"{run.folder} is complete: {command} --prompt … writes with it", file=sys.stderr)


def _facts(run: Run, options: TrainOptions, tokens_per_step: int) -> list[str]:
    return [
        *(f"{part['bytes'] / 1e6:.2f} MB for {name}" for name, part in run.description["data"].items()),
        f"{tokens_per_step:,} tokens per step",
        f"{options.limit():,} steps" if options.minutes is None else f"{options.minutes:g} minutes",
    ]


def training_arguments(options: TrainOptions, folder: Path) -> TrainingArguments:
    """Make the Trainer's arguments, and with them join the other processes, if there are any."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ValueError("Accelerate's configuration asks for FSDP: leave it out there, and give --fsdp")
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
    for name, other in product(("segment", "carry"), ("checkpointing", "fsdp")):
        if getattr(options, name) is not None and getattr(options, other):
            raise ValueError(f"--{name} does not work with --{other}")
    check_sharing(options, args.world_size)
    sequences, most = options.limit() * sequences_per_update(options, args.world_size), sys.maxsize // args.world_size
    if sequences > most:
        named = "--steps, --batch and --accumulate"
        raise ValueError(f"{named} make {sequences:,} sequences, but there can be at most {most:,}")
    return args


def _multiplies_bfloat16(use_cpu: bool) -> bool:
    """Tell whether the machine multiplies bfloat16 natively: a step then takes 0.6 to 0.8 of its time in float32."""
    if use_cpu:
        return any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
