"""All stages of `linattn linearize`. A working folder beside OUT holds checkpoints until OUT is complete."""

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
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from linattn.console.atomic import atomic_folder, write_atomically
from linattn.console.errors import CommandError, explained
from linattn.console.lock import locked
from linattn.console.memory import PROBE, TRAINED_BYTES, activation_bytes, available_memory, require_memory
from linattn.data.corpus import Choice
from linattn.linearize.choice import choose_layers
from linattn.linearize.command.page import html
from linattn.linearize.command.progress import progress_bar
from linattn.linearize.command.text import (
    TrainingBatches,
    decoded_samples,
    held_out_batches,
    load_tokenizer,
    packs_documents,
    probe_text,
    read_tokens,
)
from linattn.linearize.conversion import Conversion, convert, restore_layers
from linattn.linearize.distance import Diverged, predicts_next
from linattn.linearize.folder import FIELD
from linattn.linearize.plan import plan
from linattn.linearize.report import Probes, report
from linattn.linearize.scores import scores
from linattn.linearize.stages import FIRST_STAGE, Rates, fine_tune, transfer
from linattn.linearize.training import Budget, Training
from linattn.models.storage import MODEL_TYPE

MINUTES = 10.0
CALIBRATION, HELD_OUT, CHOOSING = 4, 16, 4
"""Batches for the closed form, for the report, and for the choice of layers."""
TIMES = (1, 4, 16)
"""The lengths of the probes, as multiples of the context."""
PROMPTS, NEW_TOKENS = 8, 64
SETTINGS = "settings.json"
FREE = ("command", "out", "save_every")
"""Options that may be others when a conversion resumes."""


def run(arguments: argparse.Namespace) -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.minutes is not None and arguments.steps is not None:
        raise CommandError("give --minutes or --steps, not both")
    with locked(arguments.out):
        if arguments.out.exists():
            raise CommandError(f"{arguments.out} exists already: choose another --out")
        return _linearize(arguments)


def _linearize(arguments: argparse.Namespace) -> int:
    model, config = load_model(arguments.model)
    context = arguments.context or min(512, positions(config))
    tokenizer = load_tokenizer(arguments.model, config)
    if context > (most := positions(config)):
        raise CommandError(f"--context {context:,} is longer than the {most:,} tokens that the model is made for")
    tokens = read_tokens(data_choice(arguments), tokenizer, config, context=context)
    if torch.cuda.is_available() and not arguments.cpu:
        model.to("cuda")  # pyright: ignore[reportCallIssue, reportArgumentType]
    mask = getattr(tokenizer, "mask_token_id", None) if is_masked(model) else None
    sizes = {"context": context, "batch": arguments.batch, "mask": mask, "packed": packs_documents(model)}
    batches = TrainingBatches(tokens.training, seed=arguments.seed, **sizes)
    with explained(f"{arguments.model} cannot be linearized", ValueError, RuntimeError):
        check_memory(model, arguments, context)
        # before any work: a model whose outputs cannot be compared cannot be trained towards its teacher
        scores(model, model, [batches[0]])
        keep = () if isinstance(arguments.keep, Fraction) else arguments.keep
        options = {name: getattr(arguments, name) for name in ("method", "window", "convolution")}
        layers = plan(model, batches[0], keep=keep, **options)
    print(layers, file=sys.stderr)
    work = open_work(arguments)
    try:
        conversion = convert(model, layers, [batches[i] for i in range(CALIBRATION)])
        held_out = held_out_batches(tokens.held_out, count=HELD_OUT, **sizes)
        facts = _train(conversion, batches, held_out, arguments, work)
        facts |= _report(conversion, probe_text(tokens.held_out), held_out, context)
    except Diverged as error:
        raise CommandError(str(error), status=1) from error
    except KeyboardInterrupt:
        raise CommandError(f"interrupted; the same command goes on with {work}", status=130) from None
    facts |= {"command": shlex.join(["linattn", *sys.argv[1:]]), "plan": layers.to_dict()}
    samples = decoded_samples(facts["generated"], tokenizer)
    write_result(arguments.out, model, tokenizer, facts | {"samples": samples})
    shutil.rmtree(work)
    print("\n".join(facts["sentences"]))
    for sample in samples[:1]:
        print("\n".join(f"{name + ':':<8} {json.dumps(text, ensure_ascii=False)}" for name, text in sample.items()))
    print(f"{arguments.out} is complete: {arguments.out / 'report.html'} has the report", file=sys.stderr)
    return 0


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """Load the model with the class that saved it."""
    with explained(f"{name} cannot be loaded", OSError, ValueError, SafetensorError):
        config: Any = AutoConfig.from_pretrained(name)
        if hasattr(config, FIELD):
            raise CommandError(f"{name} is linearized already: give the model that it was made from")
        if config.model_type == MODEL_TYPE:
            attention = config.to_language_model().attention
            names = attention if isinstance(attention, str) else ", ".join(attention)
            advice = (
                "train another one with `linattn train --attention`" if "softmax" in names else "it is linear already"
            )
            raise CommandError(f"{name} is a model of linattn, whose attention is {names}: {advice}")
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
    """Return the largest number of tokens that the model takes."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def data_choice(arguments: argparse.Namespace) -> Choice:
    """Return the choice of data by the command's options."""
    return Choice(
        paths=arguments.data,
        include=arguments.include or (),
        exclude=arguments.exclude or (),
        field=arguments.field,
        validation_paths=arguments.validation_data or (),
    )


def check_memory(model: PreTrainedModel, arguments: argparse.Namespace, context: int) -> None:
    """Raise CommandError if the memory is too small for the teacher and the optimizer beside the model or, on a CPU,
    for the activations of a batch. On a GPU, torch itself raises an error for activations that do not fit."""
    count = sum(weight.numel() for weight in model.parameters())
    on_cpu = arguments.cpu or not torch.cuda.is_available()
    available, trained = available_memory(cpu=on_cpu), 0 if arguments.lora else TRAINED_BYTES - 4
    # with the model, whose weights are there already
    needs = {f"its teacher, and what trains, of {count:,} parameters": (4 + trained) * count}
    if on_cpu:
        tokens = torch.zeros(1, min(context, PROBE), dtype=torch.int64, device=model.device)
        per_token = activation_bytes(lambda: model(input_ids=tokens), model) / tokens.numel()
        needs[f"the activations of {arguments.batch:,} × {context:,} tokens"] = per_token * arguments.batch * context
    require_memory(needs, available, "a lower --batch or --context needs less, and so does --lora")


def open_work(arguments: argparse.Namespace) -> Path:
    """Return the working folder. An interrupted conversion resumes only with the same options."""
    work = arguments.out.with_name(f"{arguments.out.name}.unfinished")
    options = {name: value for name, value in vars(arguments).items() if name not in FREE}
    settings, path = json.loads(json.dumps(options, default=str)), work / SETTINGS
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=2))
        return work
    with explained(f"{path} is corrupt", ValueError):
        before = json.loads(path.read_bytes())
        if not isinstance(before, dict):
            raise ValueError("it holds no settings")
    if other := [name for name in settings if settings[name] != before.get(name)]:
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
    """Run both stages of training, with the choice of layers between them; return their part of the report."""
    model, teacher, keep = conversion.model, conversion.teacher, arguments.keep
    facts: dict[str, Any] = {"kept": keep}
    first = _stage("transfer", partial(transfer, model, teacher, batches), arguments, work)
    if isinstance(keep, Fraction):
        count = max(1, round(keep * len(conversion.plan.replaced)))
        choice = choose_layers(model, teacher, held_out[:CHOOSING], count)
        restore_layers(model, teacher, choice.kept)
        facts = {"kept": choice.kept, "divergence_with_one_restored": choice.restored}
        print(f"layers that stay softmax: {', '.join(map(str, choice.kept))}", file=sys.stderr)
    rates = arguments.lr and Rates(arguments.lr, 2.5 * arguments.lr)
    tune = partial(fine_tune, model, teacher, batches, rates=rates, lora=arguments.lora)
    return facts | {"losses": {"transfer": first, "fine-tune": _stage("fine-tune", tune, arguments, work)}}


def _stage(
    name: str, train: Callable[[Budget], Training], arguments: argparse.Namespace, work: Path
) -> tuple[float, ...]:
    """Run a stage by `train`, which goes on from the stage's last checkpoint in `work`; return the losses."""
    share = FIRST_STAGE if name == "transfer" else 1 - FIRST_STAGE
    steps = None if arguments.steps is None else _steps(name, arguments.steps)
    minutes = None if steps is not None else share * (arguments.minutes or MINUTES)
    with progress_bar(name) as show:
        return train(Budget(steps, minutes, work / name, arguments.save_every, show)).losses


def _steps(stage: str, total: int) -> int:
    """Return the steps of a stage, its part of the `total` of both stages: at least one each."""
    first = max(1, round(FIRST_STAGE * total))
    return first if stage == "transfer" else max(1, total - first)


def _report(conversion: Conversion, text: Tensor, held_out: list[dict[str, Tensor]], context: int) -> dict[str, Any]:
    model, teacher = conversion.model, conversion.teacher
    probes = Probes()
    if model.can_generate():
        limit = positions(model.config)
        lengths = [times * context for times in TIMES if times * context < limit]
        probes = Probes(
            text=text,
            recall_lengths=[length for length in lengths if 64 <= length < len(text) - 64],
            prompts=held_out[0]["input_ids"][:PROMPTS, : context // 2],
            new_tokens=min(NEW_TOKENS, limit - context // 2),
            cost_lengths=lengths,
        )
    show: Any = partial(print, "report:", file=sys.stderr)
    return report(model, teacher, held_out, probes, progress=show).to_dict()


def is_masked(model: PreTrainedModel) -> bool:
    """Return True for a masked language model, which predicts hidden tokens from those on both sides."""
    return type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() and not predicts_next(model)


def write_result(out: Path, model: PreTrainedModel, tokenizer: Any, facts: dict[str, Any]) -> None:
    """Write the folder in one step: the model as transformers saves it, its tokenizer and the report."""
    # safetensors has errors of its own for a full disk
    with explained(f"{out} could not be written", SafetensorError), atomic_folder(out) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / "report.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        (folder / "report.html").write_text(html(facts), encoding="utf-8")
