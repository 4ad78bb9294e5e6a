"""Train a run: every process builds the model, the data and the Trainer; the first one writes files."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import transformers
from accelerate.utils import broadcast_object_list
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainingArguments

from linattn.cli.atomic import remove_leftovers, write_atomically
from linattn.cli.corpus import open_tokens
from linattn.cli.curve import draw_curve
from linattn.cli.errors import CommandError, Interrupted, explained, one_line
from linattn.cli.options import TrainOptions
from linattn.cli.prepare import create_run
from linattn.cli.reports import Reports
from linattn.cli.run_folder import DESCRIPTION, Run, last_checkpoint, open_run, read_log, recover
from linattn.cli.schedule import Schedule
from linattn.cli.trainer import RunTrainer, make_trainer, training_arguments
from linattn.cli.vocabulary import Vocabulary
from linattn.cli.windows import TrainingWindows, ValidationWindows
from linattn.integrations.transformers import LinattnConfig, LinattnForCausalLM


def train(arguments: argparse.Namespace, options: TrainOptions, vocabulary: Vocabulary) -> None:
    """Train after checking everything that can be wrong, so that a failing command leaves no folder."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = _make_model(options, vocabulary)
    with explained("this cannot be run here", ValueError, ImportError):
        args = training_arguments(options, arguments.out)

    def begin() -> None:
        if not arguments.resume:
            create_run(arguments.out, arguments.data, options, vocabulary, processes=args.world_size)

    _first_process_only(args, begin)
    _train(open_run(arguments.out), model, options, args)


def _make_model(options: TrainOptions, vocabulary: Vocabulary) -> PreTrainedModel:
    transformers.set_seed(options.seed)
    with explained("no such model", ValueError):
        config = options.language_model(vocabulary.size)
        separator = vocabulary.separator
        return LinattnForCausalLM(LinattnConfig(language_model=config, bos_token_id=separator, eos_token_id=separator))


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
    trainer, schedule = _make_trainer(run, model, options, args)
    checkpoint = last_checkpoint(run)
    first = trainer.is_world_process_zero()
    if first:
        step = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
        recover(run, step, options.keep)
        _announce(run, model, options, args, step)
    try:
        with schedule.saves_on_interrupt():
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.accelerator.wait_for_everyone()
    finally:
        trainer.reports.close()
        if first:
            remove_leftovers(run.checkpoints)
    if first:
        _finish(run, interrupted=schedule.must_stop)
    if schedule.must_stop:
        step = trainer.state.global_step
        raise Interrupted(
            f"interrupted after step {step:,}, which is saved; linattn train --resume --out {run.folder} goes on"
        )


def _make_trainer(
    run: Run, model: PreTrainedModel, options: TrainOptions, args: TrainingArguments
) -> tuple[RunTrainer, Schedule]:
    if args.world_size != run.description["processes"]:
        raise CommandError(
            f"the run began with {run.description['processes']} processes, so it cannot go on with {args.world_size}"
        )
    seconds = None if options.minutes is None else 60 * options.minutes
    schedule = Schedule(steps=options.limit(), limit=seconds, warmup=options.warmup)
    tokens_per_step = _sequences_per_update(options, args) * (options.context - 1)
    reports = Reports(run.log, schedule, tokens_per_byte=run.tokens_per_byte, tokens_per_step=tokens_per_step)
    trainer = make_trainer(run, model, _datasets(run, options, args), args, callbacks=[schedule, reports])
    trainer.schedule, trainer.reports, trainer.keep = schedule, reports, options.keep
    return trainer, schedule


def _sequences_per_update(options: TrainOptions, args: TrainingArguments) -> int:
    return options.batch * options.accumulate * args.world_size


def _datasets(run: Run, options: TrainOptions, args: TrainingArguments) -> dict[str, Dataset]:
    dtype = run.vocabulary().dtype
    tokens = {
        name: open_tokens(run.data, name, dtype, part["tokens"]) for name, part in run.description["data"].items()
    }
    length = options.limit() * _sequences_per_update(options, args)
    return {
        "training": TrainingWindows(tokens["training"], options.context, seed=options.seed, length=length),
        "validation": ValidationWindows(
            tokens["validation"], options.context, most=math.ceil(options.evaluate_tokens / options.context)
        ),
    }


def _announce(run: Run, model: PreTrainedModel, options: TrainOptions, args: TrainingArguments, step: int) -> None:
    data = {name: f"{part['bytes'] / 1e6:.2f} MB for {name}" for name, part in run.description["data"].items()}
    facts = [
        f"{run.folder}: {model.num_parameters():,} parameters",
        *data.values(),
        f"{_sequences_per_update(options, args) * options.context:,} tokens per step",
        f"{options.limit():,} steps" if options.minutes is None else f"{options.minutes:g} minutes",
        *([f"from step {step:,}"] if step else []),
    ]
    print(", ".join(facts), file=sys.stderr)


def _finish(run: Run, *, interrupted: bool) -> None:
    draw_curve(read_log(run.log), run.curve)
    if not interrupted:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_atomically(run.folder / DESCRIPTION, json.dumps(run.description | {"finished": now}, indent=2) + "\n")
        print(f"{run.folder} is complete: linattn generate {run.folder} --prompt … writes with it", file=sys.stderr)
