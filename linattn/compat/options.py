"""One record of options per package, and constructors whose arguments are fields of it.

An option that has no effect beside the others is named in a warning and left out. The originals accept such options,
and a sweep over options passes all of them to every model, so an error would stop programs that work there, while
silence would let users believe in a setting that changes nothing. An argument that does not exist is an error."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, TypeVar, final

import torch
import torch.nn.functional as F
from torch import nn

from linattn.checks import check_fields, check_sizes
from linattn.names import did_you_mean


@final
class Required(int):
    """Marks an option without a default, in the place of the default. It is an int, as fields are type-checked and all
    such options are ints."""


REQUIRED = Required(-1)

# the names of options without effect, and the end of a sentence that says why
Idle = Iterator[tuple[tuple[str, ...], str]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a package's constructors. Those that a constructor does not take keep their defaults.

    Whole numbers are sizes, at least 1; those with a default of 0, such as numbers of local heads, may be 0."""

    def __post_init__(self) -> None:
        check_fields(self)
        for option in fields(self):
            value = getattr(self, option.name)
            is_size = option.type is int or (option.type == int | None and value is not None)
            if is_size and value is not option.default:
                check_sizes(**{option.name: value}, least=0 if option.default == 0 else 1)

    def without_effect(self) -> Idle:
        """Yield the options that have no effect beside the others, with the reason. Of two reasons for one option, the
        later one counts."""
        yield from ()


Record = TypeVar("Record", bound=Options)


def takes(
    record: type[Record], names: str, **defaults: Any
) -> Callable[[Callable[[Any, Record], None]], Callable[..., None]]:
    """Let a constructor whose argument is a `record` take fields of the record as arguments instead. `names` lists
    them, separated by spaces; those after a * are keyword-only.

    `defaults` replace those of the record. The first argument may also be a whole record, from another constructor."""
    signature = _signature(record, names, defaults)

    def decorate(init: Callable[[Any, Record], None]) -> Callable[..., None]:
        @wraps(init)
        def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            if args and isinstance(args[0], record):
                init(self, args[0])
                return
            init(self, read(record, type(self), args, kwargs))

        vars(__init__)["__signature__"] = signature
        return __init__

    return decorate


def read(
    record: type[Record], constructor: type, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, prefix: str = ""
) -> Record:
    """Return the arguments of a constructor as a record. A warning names the arguments without effect, each name after
    the `prefix`; they keep their defaults."""
    arguments = _bound(inspect.signature(constructor.__init__), constructor, args, kwargs)
    defaults, given = _defaults(arguments.signature), {**arguments.arguments}
    del given["self"]
    options = record(**defaults | given)
    idle = {
        name: reason
        for name, reason in _reasons(options).items()
        if name in given and not _same(given[name], defaults[name])
    }
    if idle:
        lines = [f"{prefix}{name}={given[name]!r} has no effect {reason}" for name, reason in idle.items()]
        # the caller of the constructor, which calls this function
        warnings.warn(f"{constructor.__name__}: {'; '.join(lines)}", stacklevel=3 if not prefix else 4)
    return replace(options, **{name: defaults[name] for name in idle})


def effective(record: type[Options], constructor: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the `arguments` of a `constructor` that have an effect. Its options' `record` knows the reasons
    why others, which models saved by the original packages may have, do not."""
    _check_names(constructor, inspect.signature(constructor), arguments)
    dropped = _reasons(record(**_defaults(inspect.signature(constructor)) | dict(arguments)))
    return {name: value for name, value in arguments.items() if name not in dropped}


def _signature(record: type[Options], names: str, defaults: Mapping[str, Any]) -> inspect.Signature:
    options = {field.name: field for field in fields(record)}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for name in names.split():
        if name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        default = defaults.get(name, options[name].default)
        default = inspect.Parameter.empty if default is REQUIRED else default
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=options[name].type))
    return inspect.Signature(parameters)


def _bound(
    signature: inspect.Signature, constructor: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    # before anything is missed, which may be what is misspelt
    _check_names(constructor, signature, kwargs)
    try:
        return signature.bind(constructor, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{constructor.__name__}: {error}") from None


def _check_names(constructor: type, signature: inspect.Signature, names: Iterable[str]) -> None:
    known = [name for name in signature.parameters if name != "self"]
    for name in names:
        if name not in known:
            raise TypeError(f"{constructor.__name__} takes no argument {name!r}{did_you_mean(name, known)}")


def _defaults(signature: inspect.Signature) -> dict[str, Any]:
    return {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}


def _reasons(options: Options) -> dict[str, str]:
    return {name: reason for names, reason in options.without_effect() for name in names}


def _same(value: object, default: object) -> bool:
    if default is torch.relu and (value is F.relu or isinstance(value, nn.ReLU)):
        return True
    return value == default
