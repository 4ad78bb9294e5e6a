"""The memory that a training needs at least: the weights with their optimizer, then the activations of a batch."""

import os
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from linattn.cli.options import TrainOptions
from linattn.console.memory import (
    PROBE,
    TRAINED_BYTES,
    activation_bytes,
    available_memory,
    num_parameters,
    require_memory,
)

WEIGHTS = "the weights, their gradients and AdamW ({:,} parameters)"


def require_weights(build: Callable[[], nn.Module], options: TrainOptions) -> None:
    """Raise CommandError if the weights, which are not allocated for this, do not fit with their optimizer."""
    count = num_parameters(build)
    sharing = int(os.environ.get("WORLD_SIZE", "1")) if options.fsdp else 1
    needs = {WEIGHTS.format(count): TRAINED_BYTES * count / sharing}
    require_memory(needs, available_memory(cpu=options.cpu), "a lower --dim or --depth needs less")


def require_activations(model: PreTrainedModel, options: TrainOptions, args: TrainingArguments) -> None:
    """Raise CommandError if a CPU's memory does not hold the weights with the activations of a batch. On a GPU, torch
    itself raises an error for that."""
    if args.device.type != "cpu":
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    tokens = options.batch * options.context
    needs = {
        WEIGHTS.format(count): TRAINED_BYTES * count,
        f"the activations of {options.batch:,} × {options.context:,} tokens": _bytes_per_token(model, options, args)
        * tokens,
    }
    # the weights are there already
    available = available_memory(cpu=True) + 4 * count
    smaller = "a lower --batch (with --accumulate, updates stay the same) or --context needs less"
    require_memory(needs, available, smaller if options.checkpointing else f"{smaller}, and so does --checkpointing")


def _bytes_per_token(model: PreTrainedModel, options: TrainOptions, args: TrainingArguments) -> float:
    """Measure the bytes per token saved for the gradient; with checkpointing, count layers' inputs and the logits."""
    if options.checkpointing:
        return 4 * (options.depth * options.dim + model.config.vocab_size)
    tokens = torch.zeros(1, min(options.context, PROBE), dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        return activation_bytes(lambda: model(input_ids=tokens, labels=tokens), model) / tokens.numel()
