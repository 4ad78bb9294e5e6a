"""Train a run: every process builds the model, the data and the Trainer; the first one writes files."""

import argparse
import sys
from collections.abc import Callable

import transformers
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, TrainingArguments

from linattn.cli.atomic import remove_leftovers
from linattn.cli.checkpoints import last_step, recover
from linattn.cli.errors import CommandError, explained, one_line
from linattn.cli.options import TrainOptions
from linattn.cli.prepare import create_run
from linattn.cli.reports import draw_curve
from linattn.cli.run_folder import Run, open_run, timestamp
from linattn.cli.trainer import RunTrainer, training_arguments
from linattn.cli.vocabulary import Vocabulary
from linattn.integrations.transformers import LinattnConfig, LinattnForCausalLM


def train(arguments: argparse.Namespace, options: TrainOptions, vocabulary: Vocabulary) -> None:
    """Train after checking everything that can be wrong, so that a failing command leaves no folder."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.set_seed(options.seed)
    with explained("no such model", ValueError):
        config = options.language_model(vocabulary.size)
        separator = vocabulary.separator
        model = LinattnForCausalLM(LinattnConfig(language_model=config, bos_token_id=separator, eos_token_id=separator))
    with explained("this cannot be run here", ValueError, ImportError):
        args = training_arguments(options, arguments.out)
    if not arguments.resume:
        _first_process_only(
            args,
            lambda: create_run(arguments.out, arguments.data, options, vocabulary, processes=args.world_size),
        )
    _train(open_run(arguments.out), model, options, args)


def _first_process_only(args: TrainingArguments, action: Callable[[], None]) -> None:
    """Run the action in the first process while the others wait; if it fails, all end."""
    failure: list[str | None] = [None]
    if args.process_index == 0:
        try:
            action()
        except (CommandError, OSError) as error:
            failure = [one_line(error)]
    if args.world_size > 1:
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
        saved, going_on = trainer.state.global_step, f"linattn train --resume --out {run.folder} goes on"
        raise CommandError(f"interrupted after step {saved:,}, which is saved; {going_on}", status=130)
    if first:
        run.describe(finished=timestamp())
        print(f"{run.folder} is complete: linattn generate {run.folder} --prompt … writes with it", file=sys.stderr)


def _announce(run: Run, model: PreTrainedModel, options: TrainOptions, tokens_per_step: int, step: int) -> None:
    facts = [
        f"{run.folder}: {model.num_parameters():,} parameters",
        *(f"{part['bytes'] / 1e6:.2f} MB for {name}" for name, part in run.description["data"].items()),
        f"{tokens_per_step:,} tokens per step",
        f"{options.limit():,} steps" if options.minutes is None else f"{options.minutes:g} minutes",
        *([f"from step {step:,}"] if step else []),
    ]
    print(", ".join(facts), file=sys.stderr)
