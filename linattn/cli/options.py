"""The options of `linattn train`: each is one field, from which come the parser, the defaults and the run's record.

Those of the model are the fields of LanguageModelConfig."""

import argparse
import dataclasses
import json
from argparse import BooleanOptionalAction
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any

from linattn.attention import traits
from linattn.cli import argument_types as parse
from linattn.cli.typed_json import read_json
from linattn.console.errors import CommandError, explained
from linattn.console.trackers import HELP as TRACKERS
from linattn.models import PRESETS, LanguageModelConfig
from linattn.models.config import preset_fields, upgraded
from linattn.nn.attention import allows_induction

# how argparse reads an option of a type; the least value of an integer is the option's own
BY_TYPE: dict[Any, parse.Parsing] = {
    bool: parse.FLAG,
    float: parse.POSITIVE,
    float | None: parse.POSITIVE,
    tuple[str, ...]: parse.repeatable("NAME"),
}
MODEL_PARSING: dict[str, parse.Parsing] = {
    "attention": {"type": parse.LAYERS, "metavar": "METHOD"},
    "rotary": {"type": parse.base_or_none, "metavar": "X"},
    "dropout": parse.NOT_NEGATIVE,
    "head_norm_eps": parse.NOT_NEGATIVE,
}
# the layers that learn best in equal time (docs/learning.md), repeated to the depth
PATTERN = ("gated_delta", "gated_delta", "gated_delta", "local")
# and the width of which a CPU learns most in ten minutes (there)
MODEL_DEFAULTS = {"attention": PATTERN, "convolution": 4, "dim": 128, "window": 256}
# of a model with a layer that has gates: these mark the order of tokens, and their outputs have any size
GATED_DEFAULTS = {"convolution_on": "projections", "induction": True, "head_norm": True, "rotary": None}
# of a model of softmax alone
SOFTMAX_DEFAULTS = {"convolution_on": "projections", "induction": True}


def option(default: Any, help: str, parsing: parse.Parsing | None = None, **rules: Any) -> Any:
    """Declare an option. `parsing` has its keywords for argparse (None: they follow from its type). `rules` are
    `group`, its group in the help; `least`, the least value of an integer; `choices`, the allowed names; and `free`,
    True if --resume may change the option, because the weights do not depend on it."""
    return field(default=default, metadata={"help": help, "parsing": parsing, **rules})


def _model_option(each: dataclasses.Field) -> tuple[str, Any, Any]:
    parsing = {"action": BooleanOptionalAction} if each.type is bool else MODEL_PARSING.get(each.name)
    default = MODEL_DEFAULTS.get(each.name, each.default)
    return each.name, each.type, option(default, parsing=parsing, group="model", **each.metadata)


ModelOptions: Any = dataclasses.make_dataclass(
    "ModelOptions",
    [_model_option(each) for each in dataclasses.fields(LanguageModelConfig) if "help" in each.metadata],
    frozen=True,
    kw_only=True,
)
data, training, reports = (partial(option, group=group) for group in ("data", "training", "reports"))


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    """The options of the model, which are the fields of its configuration, and all others, each with its help text."""

    preset: str | None = option(
        None,
        f"take the options of a published architecture where none are given: {', '.join(PRESETS)}",
        {"choices": list(PRESETS), "metavar": "NAME"},
        group="model",
    )
    tokenizer: str | None = data(
        None, "file of the tokenizers package (default: bytes are the tokens)", {"metavar": "FILE"}
    )
    include: tuple[str, ...] = data((), "in folders, take only files with such names, e.g. '*.py'; repeatable")
    exclude: tuple[str, ...] = data((), "in folders, leave out files and folders with such names; repeatable")
    field: str = data("text", "of documents in rows, the field that holds the text", {"metavar": "FIELD"})
    validation_part: float = data(0.05, "share of the data, its last bytes, for validation", parse.PART)
    validation_data: tuple[str, ...] = data(
        (), "data for validation, instead of a part of DATA; repeatable", parse.repeatable("DATA")
    )

    steps: int | None = training(None, "updates of the weights (default: 2000, or as many as --minutes allows)")
    minutes: float | None = training(None, "end after so much training time; the learning rate follows the time")
    context: int = training(512, "tokens per sequence", least=2)
    segment: int | None = training(
        None, "tokens that are in memory at a time, of a sequence of any length; the gradients are those of all of it"
    )
    carry: float | None = training(
        None,
        "let this share of the sequences begin with the state after the sequence before them in their document",
        parse.SHARE,
    )
    sequence_parallel: int = training(
        1, "with several processes: so many share each sequence, of which each has a part", free=True
    )
    tensor_parallel: int = training(
        1, "with several processes: so many share the heads and hidden units of each layer", free=True
    )
    batch: int = training(4, "sequences per process, or group of them that share sequences, and batch", free=True)
    accumulate: int = training(1, "batches per update", free=True)
    optimizer: str = training(
        "muon",
        "muon: matrices of hidden layers take orthogonal steps, all other weights those of adamw",
        choices=("adamw", "muon"),
    )
    lr: float = training(5e-3, "highest learning rate")
    warmup: float | None = training(
        None,
        "part of the run in which the learning rate rises (default: 100 updates, but 0.05 to 0.3 of the run)",
        parse.PART,
    )
    weight_decay: float = training(0.1, "weight decay, for matrices only", parse.NOT_NEGATIVE)
    clip: float = training(1.0, "largest norm of the gradient (0: any)", parse.NOT_NEGATIVE)
    precision: str = training(
        "auto",
        "precision of matrix products; auto: bfloat16 where the GPU or CPU has it",
        choices=("auto", "float32", "bfloat16"),
    )
    checkpointing: bool = training(False, "recompute activations in the backward pass, to save memory")
    seed: int = training(0, "seed of the weights, the order of the data and dropout", parse.SEED)
    cpu: bool = training(False, "do not use a GPU")
    fsdp: bool = training(
        False,
        "with several processes: shard the weights (FSDP2) instead of copying them (DDP)",
        {"action": BooleanOptionalAction},
        free=True,
    )

    evaluate_every: int = reports(250, "updates from one validation to the next")
    evaluate_tokens: int = reports(262144, "tokens per validation, spread over the validation data")
    log_every: int = reports(10, "updates from one line of the log to the next", free=True)
    save_every: int = reports(250, "updates from one checkpoint to the next", free=True)
    keep: int = reports(2, "checkpoints to keep", free=True)
    track: tuple[str, ...] = reports((), TRACKERS, parse.repeatable("TRACKER"), free=True)

    def language_model(self, vocab_size: int) -> LanguageModelConfig:
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(ModelOptions)}
        if len(self.attention) == 1:
            fields["attention"] = self.attention[0]
        longest = self.context if self.positions == "learned" else None
        return LanguageModelConfig(vocab_size=vocab_size, max_length=longest, **fields)

    def limit(self) -> int:
        """Return the largest number of updates: --steps, else 2,000, or with --minutes a number that no run reaches in
        its time."""
        return self.steps or (2000 if self.minutes is None else 1_000_000)


OPTIONS = {each.name: each for each in dataclasses.fields(TrainOptions)}


def new_options(given: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a new run. Without a preset, some defaults depend on the attention. With one, an option of
    the model that is neither in the preset nor `given` has the default of LanguageModelConfig, not that of `linattn
    train`. An option whose default contradicts what is `given` has the default of LanguageModelConfig, too."""
    options = TrainOptions(**{**_defaults(given), **given})
    excluded = {name: getattr(LanguageModelConfig, name) for name in _excluded(options) if name not in given}
    return dataclasses.replace(options, **excluded)


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that depend on what is `given`: those of the preset, or those of the attention."""
    if (name := given.get("preset")) is None:
        pattern = tuple(islice(cycle(PATTERN), given.get("depth", TrainOptions.depth)))
        attention = given.get("attention", pattern)
        gated = any(traits(name).gated for name in attention if not name.startswith("convolution:"))
        defaults = GATED_DEFAULTS if gated else SOFTMAX_DEFAULTS if {*attention} == {"softmax"} else {}
        return {"attention": attention, **defaults}
    defaults = {each.name: each.default for each in dataclasses.fields(LanguageModelConfig) if each.name in OPTIONS}
    fields = defaults | preset_fields(name, given)
    if isinstance(fields["attention"], str):
        fields["attention"] = (fields["attention"],)
    return fields


def _excluded(options: TrainOptions) -> Iterator[str]:
    """Yield the options whose defaults the others may exclude."""
    if not options.convolution:
        yield "convolution_on"
    if not options.gate:
        yield "gate_function"
    if options.feed_forward == "none":
        yield "mlp_ratio"
    on, heads = options.convolution_on, (options.num_heads, options.num_key_heads)
    if not allows_induction(options.convolution, on, *heads, options.writes):
        yield "induction"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options without defaults, so that a resumed run can tell which were given."""
    groups = {name: parser.add_argument_group(name) for name in ("model", "data", "training", "reports")}
    for name, each in OPTIONS.items():
        group = groups[each.metadata["group"]]
        group.add_argument(flag(name), default=argparse.SUPPRESS, help=_help(each), **_parsing(each))


def _help(each: dataclasses.Field) -> str:
    if each.name in GATED_DEFAULTS:
        gated, other = (str(value).lower() for value in (GATED_DEFAULTS[each.name], each.default))
        which = "a layer has gates, such as gated_delta" + ", or all are softmax" * (each.name in SOFTMAX_DEFAULTS)
        return f"{each.metadata['help']} (default: {gated} if {which}, else {other})"
    if _is_absent(each.default):
        return each.metadata["help"]
    return f"{each.metadata['help']} (default: {_shown(each.default)})"


def _parsing(each: dataclasses.Field) -> parse.Parsing:
    if parsing := each.metadata["parsing"]:
        return parsing
    if choices := each.metadata.get("choices"):
        return {"choices": [choice for choice in choices if choice is not None]}
    return BY_TYPE.get(each.type) or parse.integers(each.metadata.get("least", 1))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_absent(value: Any) -> bool:
    """Return whether the command line has this value only where it does not have the option."""
    return value is None or value is False or value == ()


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options on the command line, without the defaults."""
    return _with_tuples({name: value for name, value in vars(arguments).items() if name in OPTIONS})


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def recorded_options(recorded: Mapping[str, Any]) -> TrainOptions:
    if unknown := sorted(recorded.keys() - OPTIONS):
        raise CommandError(f"the run was made with options that this version does not know: {', '.join(unknown)}")
    with explained("the run was made with options that no run has", ValueError):
        return read_json(TrainOptions, json.dumps(upgraded(recorded)))


def resumed_options(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a resumed run: those recorded, with the `given` ones in their place. A given option must
    have the recorded value, unless the weights do not depend on it."""
    before = recorded_options(recorded)
    for name, after in given.items():
        if after != (began := getattr(before, name)) and not OPTIONS[name].metadata.get("free"):
            beginning = f"without {flag(name)}" if _is_absent(began) else f"with {flag(name)} {_shown(began)}"
            raise CommandError(f"the run began {beginning}, so it cannot go on with {_shown(after)}")
    return dataclasses.replace(before, **given)
