"""The memory that a training needs at least: the weights with their optimizer, then the activations of a batch or
of its segments."""

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers import TrainingArguments

from linattn.cli.options import TrainOptions
from linattn.console.memory import (
    PROBE,
    TRAINED_BYTES,
    activation_bytes,
    available_memory,
    num_parameters,
    require_memory,
)
from linattn.console.processes import world_size
from linattn.integrations.transformers import LinattnForCausalLM
from linattn.nn.modes import evaluating
from linattn.states import num_bytes

WEIGHTS = "the weights, their gradients and the optimizer ({:,} parameters)"


def require_weights(build: Callable[[], nn.Module], options: TrainOptions) -> None:
    """Raise CommandError if the weights, which are not allocated for this, do not fit with their optimizer."""
    count = num_parameters(build)
    needs = {WEIGHTS.format(count): TRAINED_BYTES[options.optimizer] * count / _shares(options, world_size())}
    require_memory(needs, available_memory(cpu=options.cpu), "a lower --dim or --depth needs less")


def _shares(options: TrainOptions, processes: int) -> int:
    """Return the number of processes that share the weights."""
    return processes if options.fsdp else options.tensor_parallel


def require_activations(model: LinattnForCausalLM, options: TrainOptions, args: TrainingArguments) -> None:
    """Raise CommandError if a CPU's memory does not hold the weights with the activations of a batch. On a GPU, torch
    itself raises an error for that."""
    if args.device.type != "cpu":
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    own = options.context // options.sequence_parallel
    length = min(options.segment or own, own)
    activations = _bytes_per_token(model, options, args, length) * options.batch * length / options.tensor_parallel
    needs = {
        WEIGHTS.format(count): TRAINED_BYTES[options.optimizer] * count / _shares(options, args.world_size),
        f"the activations of {options.batch:,} × {length:,} tokens": activations,
    }
    if length < own:
        segments = math.ceil(options.context / length)
        size = options.batch * segments * _state_bytes(model, length)
        needs[f"the states between {segments:,} segments"] = size
    # the weights are there already
    available = available_memory(cpu=True) + 4 * count
    smaller = "a lower --batch (with --accumulate, updates stay the same) or --context needs less"
    if options.segment is not None:
        smaller = f"{smaller}, and so does a lower --segment"
    elif not options.checkpointing:
        smaller = f"{smaller}, and so do --checkpointing and --segment"
    require_memory(needs, available, smaller)


@torch.no_grad()
def _state_bytes(model: LinattnForCausalLM, length: int) -> int:
    """Return the bytes of one sequence's state after `length` tokens. Where those are more than `PROBE`, return the
    bytes after `PROBE` tokens, a lower bound."""
    with evaluating(model.model):
        _, state = model.model.extend_hidden(torch.zeros(1, min(length, PROBE), dtype=torch.long))
    return num_bytes(state)


def _bytes_per_token(model: LinattnForCausalLM, options: TrainOptions, args: TrainingArguments, length: int) -> float:
    """Measure the bytes per token saved for the gradient; with checkpointing, count layers' inputs and the logits."""
    if options.checkpointing:
        return 4 * (options.depth * options.dim + model.config.vocab_size)
    tokens = torch.zeros(1, min(length, PROBE), dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        return activation_bytes(lambda: model(input_ids=tokens, labels=tokens), model) / tokens.numel()
