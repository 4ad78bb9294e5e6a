"""The options of `linattn train`: each is one field, the source of the parser, the defaults and the run's record."""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from linattn.cli.argument_types import (
    COUNT,
    FLAG,
    NATURAL,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    SEED,
    base_or_none,
    comma_separated,
    integer_from,
    one_of,
    repeatable,
)
from linattn.cli.errors import CommandError


def option(default: Any, parsing: Mapping[str, Any], description: str, *, group: str, free: bool = False) -> Any:
    """Declare an option for argparse. A `free` one may change on --resume, because the weights do not depend on it."""
    return field(default=default, metadata={"help": description, "parsing": parsing, "group": group, "free": free})


data, model = partial(option, group="data"), partial(option, group="model")
training, reports = partial(option, group="training"), partial(option, group="reports")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The defaults learn well on a few megabytes of text."""

    tokenizer: str | None = data(
        None, {"metavar": "FILE"}, "file of the tokenizers package (default: bytes are the tokens)"
    )
    include: tuple[str, ...] = data(
        (), repeatable("NAME"), "in folders, take only files with such names, e.g. '*.py'; repeatable"
    )
    exclude: tuple[str, ...] = data(
        (), repeatable("NAME"), "in folders, leave out files and folders with such names; repeatable"
    )
    validation_part: float = data(0.05, PART, "share of the data, its last bytes, for validation")
    validation_data: tuple[str, ...] = data(
        (), repeatable("DATA"), "file or folder for validation, instead of a part of DATA; repeatable"
    )

    dim: int = model(256, COUNT, "width of the model")
    depth: int = model(4, COUNT, "number of layers")
    heads: int = model(4, COUNT, "attention heads per layer")
    key_heads: int | None = model(
        None, COUNT, "fewer heads for keys and values, shared by groups of heads (default: as many)"
    )
    head_dim: int | None = model(None, COUNT, "width of a head (default: dim / heads)")
    key_dim: int | None = model(None, COUNT, "width of a head's queries and keys (default: that of its values)")
    attention: tuple[str, ...] = model(
        ("local+elu",),
        {"type": comma_separated, "metavar": "METHOD"},
        "such as elu or local:3+elu:1; separated by commas, one per layer",
    )
    window: int = model(128, COUNT, "tokens that a local head sees")
    rotary: float | None = model(
        10000.0, {"type": base_or_none, "metavar": "X"}, "base of the rotary positions, or none"
    )
    learned_positions: bool = model(False, FLAG, "add learned position embeddings")
    convolution: int = model(4, NATURAL, "width of the short convolution before q, k and v (0: none)")
    head_norm: bool = model(False, FLAG, "normalise each head's output")
    gate: bool = model(False, FLAG, "a gate on the attention's output")
    feed_forward: str = model("gated", one_of("gated", "gelu", "none"), "the other half of a layer")
    mlp_ratio: float = model(4.0, POSITIVE, "width of the feed-forward, as a multiple of dim")
    norm: str = model("rms", one_of("rms", "layer"), "the norm before each half of a layer")
    untied: bool = model(False, FLAG, "an output matrix of its own, instead of sharing the embeddings'")
    dropout: float = model(0.0, NOT_NEGATIVE, "probability of dropping an activation")

    steps: int | None = training(None, COUNT, "updates of the weights (default: 2000, or as many as --minutes allows)")
    minutes: float | None = training(
        None, POSITIVE, "end after so much training time; the learning rate follows the time"
    )
    context: int = training(512, {"type": integer_from(2), "metavar": "N"}, "tokens per sequence")
    batch: int = training(16, COUNT, "sequences per process and batch")
    accumulate: int = training(1, COUNT, "batches per update")
    lr: float = training(1e-3, POSITIVE, "highest learning rate of AdamW")
    warmup: float = training(0.05, PART, "part of the run in which the learning rate rises")
    weight_decay: float = training(0.1, NOT_NEGATIVE, "weight decay of AdamW, for matrices only")
    clip: float = training(1.0, NOT_NEGATIVE, "largest norm of the gradient (0: any)")
    precision: str = training(
        "auto",
        one_of("auto", "float32", "bfloat16"),
        "precision of matrix products; auto: bfloat16 where the GPU or CPU has it",
    )
    checkpointing: bool = training(False, FLAG, "recompute activations in the backward pass, to save memory")
    seed: int = training(0, SEED, "seed of the weights, the order of the data and dropout")
    cpu: bool = training(False, FLAG, "do not use a GPU")
    fsdp: bool = training(
        False, FLAG, "with several processes: shard the weights (FSDP2) instead of copying them (DDP)"
    )

    evaluate_every: int = reports(250, COUNT, "updates from one validation to the next")
    evaluate_tokens: int = reports(262144, COUNT, "tokens per validation, spread over the validation data")
    log_every: int = reports(10, COUNT, "updates from one line of the log to the next", free=True)
    save_every: int = reports(250, COUNT, "updates from one checkpoint to the next", free=True)
    keep: int = reports(2, COUNT, "checkpoints to keep", free=True)

    def limit(self) -> int:
        """Return the number of updates. With --minutes, time ends the run long before a million."""
        return self.steps or (2000 if self.minutes is None else 1_000_000)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options without defaults, so that a resumed run can tell which were given."""
    groups: dict[str, Any] = {}
    for each in dataclasses.fields(TrainOptions):
        name = each.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        text = each.metadata["help"] + _default_text(each.default)
        groups[name].add_argument(flag(each.name), default=argparse.SUPPRESS, help=text, **each.metadata["parsing"])


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default_text(default: Any) -> str:
    if default is None or default is False or default == ():
        return ""
    return f" (default: {_shown(default)})"


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options on the command line, without the defaults."""
    known = {each.name for each in dataclasses.fields(TrainOptions)}
    return _with_tuples({name: value for name, value in vars(arguments).items() if name in known})


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def recorded_options(recorded: Mapping[str, Any]) -> TrainOptions:
    known = {each.name for each in dataclasses.fields(TrainOptions)}
    if unknown := sorted(set(recorded) - known):
        raise CommandError(f"the run was made with options that this version does not know: {', '.join(unknown)}")
    return TrainOptions(**_with_tuples(recorded))


def resumed_options(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a resumed run: what is given again must be the same, unless weights do not depend on it."""
    options = recorded_options(recorded)
    for each in dataclasses.fields(TrainOptions):
        before = getattr(options, each.name)
        after = given.get(each.name, before)
        if after != before and not each.metadata["free"]:
            raise CommandError(
                f"the run began with {flag(each.name)} {_shown(before)}, so it cannot go on with {_shown(after)}"
            )
    return dataclasses.replace(options, **given)


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
