"""The options of `linattn train`: each is one field, from which come the parser, the defaults and the run's record.

Those of the model are the fields of LanguageModelConfig."""

import argparse
import dataclasses
from argparse import BooleanOptionalAction
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
from linattn.models import LanguageModelConfig


def option(default: Any, parsing: Mapping[str, Any], description: str, *, group: str, free: bool = False) -> Any:
    """Declare an option for argparse. A `free` one may change on --resume, because the weights do not depend on it."""
    return field(default=default, metadata={"help": description, "parsing": parsing, "group": group, "free": free})


data, training, reports = (partial(option, group=group) for group in ("data", "training", "reports"))

# how argparse reads the fields of the model's configuration
BY_TYPE: dict[Any, Mapping[str, Any]] = {int: COUNT, int | None: COUNT, bool: {"action": BooleanOptionalAction}}
BY_NAME: dict[str, Mapping[str, Any]] = {
    "attention": {"type": comma_separated, "metavar": "METHOD"},
    "rotary": {"type": base_or_none, "metavar": "X"},
    "convolution": NATURAL,
    "mlp_ratio": POSITIVE,
    "dropout": NOT_NEGATIVE,
}
# what learns well on a few megabytes of text
MODEL_DEFAULTS = {"attention": ("local+elu",), "convolution": 4}


def _model_option(each: dataclasses.Field) -> tuple[str, Any, Any]:
    if choices := each.metadata["choices"]:
        parsing = one_of(*(choice for choice in choices if choice is not None))
    else:
        parsing = BY_NAME.get(each.name) or BY_TYPE[each.type]
    default = MODEL_DEFAULTS.get(each.name, each.default)
    return each.name, each.type, option(default, parsing, each.metadata["help"], group="model")


ModelOptions: Any = dataclasses.make_dataclass(
    "ModelOptions",
    [_model_option(each) for each in dataclasses.fields(LanguageModelConfig) if "help" in each.metadata],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    """The options of the model, which are the fields of its configuration, and all others."""

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

    def language_model(self, vocab_size: int) -> LanguageModelConfig:
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(ModelOptions)}
        if len(self.attention) == 1:
            fields["attention"] = self.attention[0]
        longest = self.context if self.positions == "learned" else None
        return LanguageModelConfig(vocab_size=vocab_size, max_length=longest, **fields)

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
