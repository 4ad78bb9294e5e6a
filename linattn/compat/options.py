"""Options that have no effect beside others. Constructors refuse them; they are dropped from the arguments that old
weights were made with."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Options = Mapping[str, Any]


class Rule(NamedTuple):
    """The options `names` have no effect if `applies(options)`; `reason` ends a sentence that says so."""

    names: tuple[str, ...]
    applies: Callable[[Options], bool]
    reason: str


def check_options(constructor: type, rules: Iterable[Rule], options: Options) -> None:
    """Raise a ValueError if an option that has no effect is not the constructor's default.

    A constructor calls it first of all, when its `locals()` are its arguments."""
    parameters = inspect.signature(constructor).parameters
    for name, reason in _without_effect(rules, options).items():
        if name in options and not _same(options[name], parameters[name].default):
            raise ValueError(f"{name} is {options[name]!r}, but it has no effect {reason}: leave it out")


def select(constructor: type, arguments: Options) -> dict[str, Any]:
    """Return those of the arguments that the constructor takes."""
    return {name: arguments[name] for name in inspect.signature(constructor).parameters if name in arguments}


def effective(constructor: type, rules: Iterable[Rule], arguments: Options) -> dict[str, Any]:
    """Return the arguments that have an effect."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(constructor).parameters.items()}
    dropped = _without_effect(rules, defaults | dict(arguments))
    return {name: value for name, value in arguments.items() if name not in dropped}


def _without_effect(rules: Iterable[Rule], options: Options) -> dict[str, str]:
    return {name: rule.reason for rule in rules if rule.applies(options) for name in rule.names}


def _same(value: object, default: object) -> bool:
    if default is torch.relu and (value is F.relu or isinstance(value, nn.ReLU)):
        return True
    return value == default
