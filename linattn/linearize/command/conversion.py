"""Runs `linattn linearize`: every stage of a conversion, in a working folder beside OUT until all is done."""

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from linattn.console.atomic import atomic_file, atomic_folder, write_atomically
from linattn.console.errors import CommandError, explained
from linattn.linearize import (
    Budget,
    Conversion,
    Rates,
    Training,
    choose_layers,
    convert,
    fine_tune,
    plan,
    restore_layers,
    scores,
    transfer,
)
from linattn.linearize.command.data import Tokens, TrainingBatches, held_out_batches, load_tokenizer, read_tokens
from linattn.linearize.command.page import html
from linattn.linearize.command.progress import showing
from linattn.linearize.distance import Diverged
from linattn.linearize.folder import FIELD
from linattn.linearize.report import Probes, report
from linattn.linearize.transfer import FIRST_STAGE

MINUTES = 10.0
CALIBRATION, HELD_OUT, CHOOSING = 4, 16, 4
"""Batches for the closed form, for the report, and for the choice of layers."""
TIMES = (1, 4, 16)
"""The lengths of the probes, as multiples of the context."""
PROMPTS, NEW_TOKENS = 8, 64
SETTINGS = "settings.json"


def run(arguments: argparse.Namespace) -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.out.exists():
        raise CommandError(f"{arguments.out} exists already: choose another --out")
    if arguments.minutes is not None and arguments.steps is not None:
        raise CommandError("give --minutes or --steps, not both")
    model, config = load_model(arguments.model)
    context = arguments.context or min(512, positions(config))
    tokenizer = load_tokenizer(arguments.model, config)
    tokens = read_tokens(arguments.data, arguments.include or (), tokenizer)
    require_tokens(tokens, context)
    require_room(config, tokens, context)
    if torch.cuda.is_available() and not arguments.cpu:
        model.to("cuda")  # pyright: ignore[reportCallIssue, reportArgumentType]
    batches = TrainingBatches(tokens.training, context=context, batch=arguments.batch, seed=arguments.seed)
    with explained(f"{arguments.model} cannot be linearized", ValueError, RuntimeError):
        first = _here(model, [batches[0]])
        # before any work: a model whose outputs cannot be compared has no way to its teacher
        scores(model, model, first)
        keep = () if isinstance(arguments.keep, Fraction) else arguments.keep
        options = {name: getattr(arguments, name) for name in ("method", "window", "convolution")}
        planned = plan(model, *first, keep=keep, **options)
    print(planned, file=sys.stderr)
    work = open_work(arguments)
    try:
        conversion = convert(model, planned, _here(model, [batches[i] for i in range(CALIBRATION)]))
        held_out = held_out_batches(tokens.held_out, context=context, batch=arguments.batch, count=HELD_OUT)
        facts = _train(conversion, batches, _here(model, held_out), arguments, work)
        made = _report(conversion, tokens.held_out, _here(model, held_out), context)
    except Diverged as error:
        raise CommandError(str(error), status=1) from error
    except KeyboardInterrupt:
        raise CommandError(f"interrupted; the same command goes on with {work}", status=130) from None
    made |= facts | {"command": shlex.join(["linattn", *sys.argv[1:]]), "plan": planned.to_dict()}
    write_result(arguments.out, model, tokenizer, made)
    shutil.rmtree(work)
    print("\n".join(made["sentences"]))
    print(f"{arguments.out} is complete: {arguments.out / 'report.html'} has the report", file=sys.stderr)
    return 0


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """Load the model with the class that it was saved from."""
    with explained(f"{name} cannot be loaded", OSError, ValueError, SafetensorError):
        config: Any = AutoConfig.from_pretrained(name)
        if hasattr(config, FIELD):
            raise CommandError(f"{name} is linearized already: give the model that it was made from")
        kind = getattr(transformers, (config.architectures or ["none"])[0], None)
        if kind is None or not hasattr(kind, "from_pretrained"):
            raise CommandError(f"{name} is of {config.architectures}, which transformers does not have")
        model = kind.from_pretrained(name, dtype=torch.float32).eval()
    if model.main_input_name != "input_ids" or config.is_encoder_decoder:
        raise CommandError(
            f"the command reads text into models of one row of tokens, but {type(model).__name__} is none: "
            "linattn.linearize has its stages as functions"
        )
    return model, config


def positions(config: PreTrainedConfig) -> int:
    """Return the number of tokens that the model is made for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def require_tokens(tokens: Tokens, context: int) -> None:
    for name, row in tokens._asdict().items():
        if len(row) < context:
            raise CommandError(
                f"the data are too short: {len(row):,} tokens are {name.replace('_', ' ')}, but a context of "
                f"{context:,} needs at least {context:,}"
            )


def require_room(config: PreTrainedConfig, tokens: Tokens, context: int) -> None:
    """Raise unless the model has a position and an embedding for every token."""
    if context > (most := positions(config)):
        raise CommandError(f"--context {context:,} is longer than the {most:,} tokens that the model is made for")
    largest, size = max(int(row.max()) for row in tokens), config.get_text_config().vocab_size
    if largest >= size:
        raise CommandError(f"the tokenizer has a token {largest:,}, but the model has only {size:,} tokens")


def _here(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: tensor.to(model.device) for name, tensor in batch.items()} for batch in batches]


def open_work(arguments: argparse.Namespace) -> Path:
    """Return the working folder. A conversion that was interrupted goes on only with the same options."""
    work = arguments.out.with_name(f"{arguments.out.name}.unfinished")
    free = ("command", "out", "save_every")
    given = {name: value for name, value in vars(arguments).items() if name not in free}
    settings, path = json.loads(json.dumps(given, default=str)), work / SETTINGS
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=2))
        return work
    with explained(f"{path} is corrupt", ValueError):
        begun = json.loads(path.read_bytes())
        if not isinstance(begun, dict):
            raise ValueError("it holds no settings")
    if other := [name for name in settings if settings[name] != begun.get(name)]:
        raise CommandError(f"{work} was begun with another {', '.join(other)}: give the same, or delete the folder")
    print(f"going on with {work}", file=sys.stderr)
    return work


def _train(
    conversion: Conversion,
    batches: TrainingBatches,
    held_out: list[dict[str, Tensor]],
    arguments: argparse.Namespace,
    work: Path,
) -> dict[str, Any]:
    """Run the two stages of training, and the choice of layers between them; return what to report of them."""
    model, teacher = conversion.model, conversion.teacher
    facts: dict[str, Any] = {"kept": list(arguments.keep) if isinstance(arguments.keep, tuple) else []}
    stage = partial(_stage, model, arguments, work)
    losses = {"transfer": stage("transfer", partial(transfer, model, teacher, batches))}
    if isinstance(arguments.keep, Fraction):
        count = max(1, round(arguments.keep * len(conversion.plan.replaced)))
        chosen = choose_layers(model, teacher, held_out[:CHOOSING], count)
        restore_layers(model, teacher, chosen.kept)
        facts |= {"kept": list(chosen.kept), "divergence_with_one_restored": chosen.restored}
        print(f"layers that stay softmax: {', '.join(map(str, chosen.kept))}", file=sys.stderr)
    rates = arguments.lr and Rates(arguments.lr, 2.5 * arguments.lr)
    tune = partial(fine_tune, model, teacher, batches, rates=rates, lora=arguments.lora)
    losses["fine-tune"] = stage("fine-tune", tune)
    return facts | {"losses": losses}


def _stage(
    model: PreTrainedModel, arguments: argparse.Namespace, work: Path, name: str, train: Callable[[Budget], Training]
) -> list[float]:
    """Train, or take the result of a run that was interrupted after this stage; return the losses."""
    done, share = work / f"{name}.pt", FIRST_STAGE if name == "transfer" else 1 - FIRST_STAGE
    if not done.exists():
        steps = None if arguments.steps is None else _steps(name, arguments.steps)
        minutes = None if steps is not None else share * (arguments.minutes or MINUTES)
        with showing(name) as show:
            training = train(Budget(steps, minutes, work / name, arguments.save_every, show))
        with atomic_file(done) as file:
            torch.save({"weights": model.state_dict(), "losses": training.losses}, file)
        shutil.rmtree(work / name, ignore_errors=True)
    saved = torch.load(done, map_location=model.device, weights_only=True)
    model.load_state_dict(saved["weights"])
    return list(saved["losses"])


def _steps(stage: str, total: int) -> int:
    """Divide all steps between the stages, at least one each."""
    first = max(1, round(FIRST_STAGE * total))
    return first if stage == "transfer" else max(1, total - first)


def _report(conversion: Conversion, text: Tensor, held_out: list[dict[str, Tensor]], context: int) -> dict[str, Any]:
    model, teacher = conversion.model, conversion.teacher
    probes = Probes()
    if model.can_generate():
        limit = positions(model.config)
        lengths = [times * context for times in TIMES if times * context < limit]
        probes = Probes(
            text=text.to(model.device),
            recall_lengths=[length for length in lengths if 64 <= length < len(text) - 64],
            prompts=held_out[0]["input_ids"][:PROMPTS, : context // 2],
            new_tokens=min(NEW_TOKENS, limit - context // 2),
            cost_lengths=lengths,
        )
    return report(
        model, teacher, held_out, probes, progress=lambda stage: print(f"report: {stage}", file=sys.stderr)
    ).to_dict()


def write_result(out: Path, model: PreTrainedModel, tokenizer: Any, made: dict[str, Any]) -> None:
    """Write the folder as a whole: the model as transformers saves it, its tokenizer and the report."""
    with atomic_folder(out) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / "report.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        (folder / "report.html").write_text(html(made), encoding="utf-8")
