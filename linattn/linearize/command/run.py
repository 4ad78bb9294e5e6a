"""All stages of `linattn linearize`. A working folder beside OUT holds checkpoints until OUT has the model."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import fmean

import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from linattn.console.atomic import write_atomically
from linattn.console.errors import CommandError, explained
from linattn.console.lock import locked
from linattn.console.processes import ending_together, first_process_only, from_first, joined_processes
from linattn.console.trackers import Trackers, check_trackers
from linattn.integrations.transformers.stock_attention.attention import OWN
from linattn.linearize.choice import choose_layers
from linattn.linearize.command.budget import STEP, budget_note
from linattn.linearize.command.inputs import check_memory, load_model, read_text, trained_weights
from linattn.linearize.command.progress import progress_bar
from linattn.linearize.command.result import (
    DATA,
    RECORD,
    REPORT,
    Record,
    read_json,
    read_record,
    report_command,
    settings,
    write_model,
    write_report,
)
from linattn.linearize.command.text import TrainingBatches, held_out_batches, probe_text
from linattn.linearize.command.work import open_work, say, work_folder
from linattn.linearize.conversion import Conversion, convert, make_teacher, restore_layers
from linattn.linearize.distance import Diverged, layer_errors
from linattn.linearize.folder import load_linearized
from linattn.linearize.plan import Plan, plan
from linattn.linearize.processes import process_count, process_rank
from linattn.linearize.scores import Scores, scores
from linattn.linearize.stages import FIRST_STAGE, Rates, fine_tune, transfer
from linattn.linearize.training import Budget, Figures, Progress, Training, saved_steps

MINUTES = 10.0
CALIBRATION, HELD_OUT, CHOOSING, VALIDATION = 4, 16, 4, 4
"""Batches for the closed form, for the report, for the choice of layers, and for validations while it trains."""
VALIDATED = ("loss", "kl", "cosine")
"""The scores of a validation."""
TRACKS = "tracks"
REPORT_SHARE = 0.2
"""The report's share of the training's time."""


def run(arguments: argparse.Namespace) -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.minutes is not None and arguments.steps is not None:
        raise CommandError("give --minutes or --steps, not both")
    check_trackers(arguments.track or ())
    with joined_processes(cpu=arguments.cpu), ExitStack() as stack:
        rank, out = process_rank(), arguments.report or arguments.out
        message = "another process of the conversion has ended, and so does this one; the same command goes on"
        with ending_together(rank, out, message):
            first_process_only(rank, out, partial(_hold, stack, out))
            return _run(arguments)


def _hold(stack: ExitStack, out: Path) -> None:
    stack.enter_context(locked(out))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.report is None and not from_first(arguments.out.exists()):
        return _linearize(arguments)
    if process_rank() > 0:
        # the first process alone measures
        return 0
    if arguments.report is not None:
        return _report_again(arguments)
    if not (arguments.out / RECORD).exists() or (arguments.out / REPORT).exists():
        raise CommandError(f"{arguments.out} exists already: choose another --out")
    record = read_record(arguments.out)
    if record["settings"] != settings(arguments):
        raise CommandError(f"{arguments.out} exists already, made with other options: choose another --out")
    say(f"{arguments.out} has its model: going on with the report")
    return _report(arguments, arguments.out, record, REPORT_SHARE * record["seconds"])


def _linearize(arguments: argparse.Namespace) -> int:
    if arguments.fsdp and process_count() == 1:
        raise CommandError("--fsdp shares weights among processes, but there is one: start the command by torchrun")
    model, config = load_model(arguments)
    tokenizer, tokens, sizes = read_text(arguments, model, config)
    batches = TrainingBatches(tokens.training, seed=arguments.seed, **sizes)
    with explained(f"{arguments.model} cannot be linearized", ValueError, RuntimeError):
        if arguments.checkpointing and not model.supports_gradient_checkpointing:
            raise ValueError(f"--checkpointing: {type(model).__name__} cannot recompute activations")
        check_memory(model, arguments, sizes["context"])
        # before any work: a model whose outputs cannot be compared cannot be trained towards its teacher
        scores(model, model, [batches[0]])
        keep = () if isinstance(arguments.keep, Fraction) else arguments.keep
        options = {name: getattr(arguments, name) for name in ("method", "window", "convolution")}
        layers = plan(model, batches[0], keep=keep, **options)
        # a share that leaves no layer is refused before the training
        _kept(arguments.keep, layers)
    say(layers)
    rank, out = process_rank(), arguments.out
    work = first_process_only(rank, out, partial(open_work, arguments))
    held_out = held_out_batches(tokens.held_out, count=HELD_OUT, **sizes)
    try:
        # gates are random, and must be the same when the conversion resumes
        transformers.set_seed(arguments.seed)
        conversion = convert(model, layers, [batches[i] for i in range(CALIBRATION)], shared=True)
        with closing(open_trackers(arguments, work)) as trackers:
            record = _train(conversion, batches, held_out, arguments, trackers)
        first_process_only(rank, out, partial(write_model, out, model, tokenizer, record))
    except Diverged as error:
        raise CommandError(str(error), status=1) from error
    except KeyboardInterrupt:
        raise CommandError(f"interrupted; the same command goes on with {work}", status=130) from None
    if rank == 0:
        _end_work(out)
        given = out, record, model, conversion.teacher, tokenizer, probe_text(tokens.held_out), held_out
        with report_fails_alone(out):
            write_report(*given, seconds=REPORT_SHARE * record["seconds"])
    return 0


def _report_again(arguments: argparse.Namespace) -> int:
    """Make the report of a finished conversion again, from its record, without a limit on time."""
    out: Path = arguments.report
    record = read_record(out)
    options = {name: getattr(arguments, name) for name in ("model", *DATA) if getattr(arguments, name)}
    restored = argparse.Namespace(**record["settings"] | options | {"cpu": arguments.cpu})
    return _report(restored, out, record, None)


def _report(arguments: argparse.Namespace, out: Path, record: Record, seconds: float | None) -> int:
    """Load the model of a finished conversion and its teacher, and write the report. End the work, if the process that
    wrote the model did not."""
    _end_work(out)
    stock, config = load_model(arguments)
    with explained(f"{out} cannot be loaded", OSError, ValueError, SafetensorError):
        model = load_linearized(out, dtype=stock.dtype, device_map={"": stock.device}).eval()
    if _weights(stock) != _weights(model):
        raise CommandError(f"{out} was not made from {arguments.model}, whose weights have other names or shapes")
    tokenizer, tokens, sizes = read_text(arguments, stock, config)
    teacher = make_teacher(stock, shared=True)
    held_out = held_out_batches(tokens.held_out, count=HELD_OUT, **sizes)
    with report_fails_alone(out):
        write_report(out, record, model, teacher, tokenizer, probe_text(tokens.held_out), held_out, seconds=seconds)
    return 0


def _weights(model: PreTrainedModel) -> set[str]:
    """Return the names and shapes of a model's weights, but for those of linear attention."""
    weights = model.state_dict().items()
    return {f"{name} {tuple(x.shape)}" for name, x in weights if OWN not in name.split(".")}


@contextmanager
def report_fails_alone(out: Path) -> Iterator[None]:
    """Say, where a report ends early, that the model is there and how to make the report."""
    again = f"{out} has the model, but no report: {report_command(out)} makes it"
    try:
        yield
    except KeyboardInterrupt:
        raise CommandError(f"interrupted; {again}", status=130) from None
    except Diverged as error:
        raise CommandError(f"{error}; {again}", status=1) from error
    except BaseException:
        print(again, file=sys.stderr)
        raise


def _train(
    conversion: Conversion,
    batches: TrainingBatches,
    held_out: list[dict[str, Tensor]],
    arguments: argparse.Namespace,
    trackers: Trackers,
) -> Record:
    """Run both stages of training, with the choice of layers between them; return the record of the conversion."""
    model, teacher, keep, work = conversion.model, conversion.teacher, arguments.keep, work_folder(arguments.out)
    tokens = process_count() * arguments.accumulate * held_out[0]["input_ids"].numel()
    record: Record = {"settings": settings(arguments), "plan": conversion.plan.to_dict(), "kept": keep}
    record["swapped_in"], seconds = _swapped_in(conversion, held_out, work)
    _announce(model, held_out[0], arguments, seconds)
    bar = progress_bar("transfer", tokens, trackers.log)
    validate = partial(_layer_error, teacher, held_out[:VALIDATION])
    first = _stage("transfer", partial(transfer, model, teacher, batches), arguments, bar, validate)
    if count := _kept(keep, conversion.plan):
        choice = from_first(choose_layers(model, teacher, held_out[:CHOOSING], count))
        restore_layers(model, teacher, choice.kept)
        record |= {"kept": choice.kept, "divergence_with_one_restored": choice.restored}
        say(f"layers that stay softmax: {', '.join(map(str, choice.kept))}")
    rates = arguments.lr and Rates(arguments.lr, 2.5 * arguments.lr, arguments.lr)
    tune = partial(fine_tune, model, teacher, batches, rates=rates, lora=arguments.lora)
    with recomputing(model) if arguments.checkpointing else nullcontext():
        bar = progress_bar("fine-tune", tokens, lambda values, step: trackers.log(values, first.steps + step))
        validate = partial(_distance, teacher, held_out[:VALIDATION])
        second = _stage("fine-tune", tune, arguments, bar, validate)
    stages = {"transfer": first, "fine-tune": second}
    record["losses"] = {name: stage.losses for name, stage in stages.items()}
    record["validations"] = {name: stage.validations for name, stage in stages.items()}
    record["reset"] = _reset_if_worse(conversion, held_out, Scores(**record["swapped_in"]))
    return record | {"seconds": first.seconds + second.seconds}


def _kept(keep: Fraction | tuple[int, ...], layers: Plan) -> int:
    """Return the number of layers that are chosen to stay softmax: a share of those in the plan, at least one, or none
    if `keep` names the layers."""
    if not isinstance(keep, Fraction):
        return 0
    linear = len(layers.replaced)
    if (count := max(1, round(keep * linear))) == linear:
        raise ValueError(f"--keep {keep} of {linear} layers leaves none that becomes linear")
    return count


def _layer_error(teacher: PreTrainedModel, held_out: list[dict[str, Tensor]], model: PreTrainedModel) -> Figures:
    """Return the mean error of the linear layers, each given the input of the teacher's layer."""
    return {"error": fmean(layer_errors(model, teacher, held_out).values())}


def _distance(teacher: PreTrainedModel, held_out: list[dict[str, Tensor]], model: PreTrainedModel) -> Figures:
    found = scores(model, teacher, held_out)._asdict()
    return {name: found[name] for name in VALIDATED if found[name] is not None}


def _reset_if_worse(conversion: Conversion, held_out: list[dict[str, Tensor]], before: Scores) -> bool:
    """Restore the weights before the training if the model was better with them; return whether it was."""
    after = scores(conversion.model, conversion.teacher, held_out)
    worse = after.cosine < before.cosine
    if None not in (before.kl, after.kl, before.loss, after.loss):
        worse = after.kl + after.loss > before.kl + before.loss  # pyright: ignore[reportOperatorIssue]
    if worse := from_first(worse):
        conversion.reset()
        say("training did not help: OUT has the weights before it; give it more steps or data")
    return worse


@contextmanager
def recomputing(model: PreTrainedModel) -> Iterator[None]:
    """Recompute activations in the backward pass inside the block."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.activation_checkpointing_disable()


def _swapped_in(conversion: Conversion, held_out: list[dict[str, Tensor]], work: Path) -> tuple[Record, float]:
    """Return the scores of the model before its training, and the seconds that a batch took. They are measured once,
    also if the training is interrupted."""
    path = work / "swapped_in.json"

    def measured() -> tuple[Record, float]:
        if not path.exists():
            started = time.monotonic()
            found = scores(conversion.model, conversion.teacher, held_out)
            seconds = (time.monotonic() - started) / len(held_out)
            write_atomically(path, json.dumps({"scores": found._asdict(), "seconds": seconds}))
        record = read_json(path, "scores", "seconds")
        return record["scores"], record["seconds"]

    return first_process_only(process_rank(), path, measured)


def _announce(model: PreTrainedModel, batch: dict[str, Tensor], arguments: argparse.Namespace, seconds: float) -> None:
    """Say if the budget is too small for the model. `seconds` is the time of its forward pass and the teacher's."""
    each = STEP * seconds * arguments.accumulate
    tokens = process_count() * arguments.accumulate * batch["input_ids"].numel()
    note = budget_note(
        trained_weights(model, arguments.lora), tokens, arguments.steps, arguments.minutes or MINUTES, each
    )
    if note is not None:
        say(note)


def _stage(
    name: str,
    train: Callable[[Budget], Training],
    arguments: argparse.Namespace,
    bar: AbstractContextManager[Callable[[Progress], None]],
    validate: Callable[[PreTrainedModel], Figures],
) -> Training:
    """Run a stage by `train`, which goes on from the stage's last checkpoint, and shows its progress by `bar`, with
    figures of the model on held-out text by `validate`."""
    share = FIRST_STAGE if name == "transfer" else 1 - FIRST_STAGE
    steps = None if arguments.steps is None else _steps(name, arguments.steps)
    minutes = None if steps is not None else share * (arguments.minutes or MINUTES)
    with bar if process_rank() == 0 else nullcontext() as show:
        return train(
            Budget(
                steps=steps,
                minutes=minutes,
                folder=work_folder(arguments.out) / name,
                save_every=arguments.save_every,
                accumulate=arguments.accumulate,
                shard=arguments.fsdp,
                report=show,
                validate=validate,
            )
        )


def open_trackers(arguments: argparse.Namespace, work: Path) -> Trackers:
    """Return the trackers of --track. Until OUT is there, their files are in the working folder, under OUT's name."""
    names, facts = (arguments.track or ()) if process_rank() == 0 else (), settings(arguments)
    folder = work / TRACKS / arguments.out.name
    folder.mkdir(parents=True, exist_ok=True)
    identity = f"{arguments.out.resolve()} {json.dumps(facts)}"
    with explained(f"{work} cannot go on", ValueError):
        step = sum(saved_steps(work / name) for name in ("transfer", "fine-tune"))
    return Trackers(names, folder, facts, identity=identity, step=step)


def _end_work(out: Path) -> None:
    """Move the trackers' files to OUT, unless this was done before an interruption, and delete the working folder."""
    work = work_folder(out)
    for files in (work / TRACKS / out.name).glob("*"):
        shutil.move(files, out / files.name)
    shutil.rmtree(work, ignore_errors=True)


def _steps(stage: str, total: int) -> int:
    """Return the steps of a stage, its part of the `total` of both stages: at least one each."""
    first = max(1, round(FIRST_STAGE * total))
    return first if stage == "transfer" else max(1, total - first)
