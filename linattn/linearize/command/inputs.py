"""The inputs of `linattn linearize`: the model, the text, and the memory that they need."""

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from linattn.console.errors import CommandError, explained
from linattn.console.memory import PROBE, TRAINED_BYTES, activation_bytes, available_memory, require_memory
from linattn.data.corpus import Choice
from linattn.linearize.command.result import positions
from linattn.linearize.command.text import Tokens, load_tokenizer, packs_documents, read_tokens
from linattn.linearize.folder import FIELD
from linattn.linearize.predictions import predicts_next
from linattn.linearize.processes import process_count
from linattn.models.storage import MODEL_TYPE


def read_text(
    arguments: argparse.Namespace, model: PreTrainedModel, config: PreTrainedConfig
) -> tuple[Any, Tokens, dict[str, Any]]:
    """Return the model's tokenizer, the tokens of the data, and the sizes of their batches."""
    context = arguments.context or min(512, positions(config))
    if context > (most := positions(config)):
        raise CommandError(f"--context {context:,} is longer than the {most:,} tokens that the model is made for")
    tokenizer = load_tokenizer(arguments.model, config)
    tokens = read_tokens(data_choice(arguments), tokenizer, config, context=context)
    mask = getattr(tokenizer, "mask_token_id", None) if is_masked(model) else None
    return (
        tokenizer,
        tokens,
        {
            "context": context,
            "batch": arguments.batch,
            "mask": mask,
            "packed": packs_documents(model),
        },
    )


def data_choice(arguments: argparse.Namespace) -> Choice:
    """Return the choice of data by the command's options."""
    return Choice(
        paths=arguments.data,
        include=arguments.include or (),
        exclude=arguments.exclude or (),
        field=arguments.field,
        validation_paths=arguments.validation_data or (),
    )


def load_model(arguments: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """Load the model with the class that saved it, straight to its device."""
    name, on_gpu = arguments.model, torch.cuda.is_available() and not arguments.cpu
    placed = {"dtype": getattr(torch, arguments.dtype), "device_map": {"": "cuda" if on_gpu else "cpu"}}
    place = "" if Path(name).exists() else " from the Hub, and there is no such folder here"
    with explained(f"{name} cannot be loaded{place}", OSError, ValueError, SafetensorError):
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
        model = kind.from_pretrained(name, **placed).eval()
    if model.main_input_name != "input_ids" or config.is_encoder_decoder:
        raise CommandError(
            f"the command reads text into models of one row of tokens, but {type(model).__name__} is none: "
            "linattn.linearize has its stages as functions"
        )
    return model, config


def check_memory(model: PreTrainedModel, arguments: argparse.Namespace, context: int) -> None:
    """Raise CommandError if the memory is too small for the teacher and the optimizer beside the model or, on a CPU,
    for the activations of a batch. On a GPU, torch itself raises an error for activations that do not fit."""
    count, size = trained_weights(model, arguments.lora), model.dtype.itemsize
    on_cpu = arguments.cpu or not torch.cuda.is_available()
    available = available_memory(cpu=on_cpu)
    # the weights are there already; what trains is float32, and then the teacher has weights of its own
    each = TRAINED_BYTES["muon"]
    trained = each * count if not arguments.fsdp else (size + each / process_count()) * count
    needs = {f"its teacher, and what trains, of {count:,} parameters": trained}
    if on_cpu:
        tokens = torch.zeros(1, min(context, PROBE), dtype=torch.int64, device=model.device)
        per_token = activation_bytes(lambda: model(input_ids=tokens), model) / tokens.numel()
        if arguments.checkpointing:
            text: Any = model.config.get_text_config()
            per_token = size * (text.num_hidden_layers * text.hidden_size + text.vocab_size)
        needs[f"the activations of {arguments.batch:,} × {context:,} tokens"] = per_token * arguments.batch * context
    smaller = "a lower --batch (with --accumulate, updates stay the same) or --context needs less, and so do"
    require_memory(needs, available, f"{smaller} --dtype bfloat16, --checkpointing and --lora")


def trained_weights(model: PreTrainedModel, lora: int | None) -> int:
    """Return the number of weights that train: all, or with adapters those of attention, as in the first stage."""
    parts = [model] if lora is None else [x for x in model.modules() if hasattr(x, "is_causal")]
    return sum(weight.numel() for part in parts for weight in part.parameters())


def is_masked(model: PreTrainedModel) -> bool:
    """Return True for a masked language model, which predicts hidden tokens from those on both sides."""
    return type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() and not predicts_next(model)
