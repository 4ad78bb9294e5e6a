"""Checks of options, for every layer, made once at the boundary, so that errors show what the caller passed."""

import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def check_sizes(*, least: int = 1, **sizes: object) -> None:
    """Raise ValueError, by name, unless each size, or each entry of a tuple, is a whole number of at least `least`."""
    for name, size in sizes.items():
        for each in size if isinstance(size, tuple) else (size,):
            if not isinstance(each, Integral) or isinstance(each, bool) or int(each) < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, but is {size!r}")


def check_numbers(*, least: float = 0.0, **numbers: object) -> None:
    """Raise ValueError unless the numbers are finite and at least `least`."""
    for name, number in numbers.items():
        if not isinstance(number, Real) or isinstance(number, bool) or not least <= float(number) < math.inf:
            raise ValueError(f"{name} must be a finite number of at least {least:g}, but is {number!r}")


def plain_number(value: Any) -> Any:
    """Return a number of another package, such as numpy, as one of Python, which JSON can hold, and all else as it
    is."""
    if isinstance(value, Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: option for name, option in options.items() if option is not None}


def on_one_device(x: Any, y: Any, z: Any) -> bool:
    """Return whether these are tensors on the same device. It takes a third of the time of `check_tensors`."""
    are_tensors = isinstance(x, Tensor) and isinstance(y, Tensor) and isinstance(z, Tensor)
    return are_tensors and x.device == y.device == z.device


def check_tensors(**tensors: object) -> None:
    """Raise ValueError unless all are tensors on the same device."""
    device = None
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, but is {'None' if x is None else f'a {type(x).__name__}'}")
        device = device or x.device
        if x.device != device:
            raise ValueError(
                f"tensors must be on one device, but {next(iter(tensors))} is on {device} and {name} on {x.device}"
            )


def check_instances(kind: type, **objects: object) -> None:
    """Raise ValueError, by name, unless each object is an instance of `kind`."""
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    for name, x in objects.items():
        if not isinstance(x, kind):
            raise ValueError(f"{name} must be {article} {kind.__name__}, but is {x!r:.60}")


def check_floating(**tensors: Any) -> None:
    """Raise ValueError unless all are floating-point tensors on the same device."""
    check_tensors(**tensors)
    for name, x in tensors.items():
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} must be floating-point, but is {x.dtype}")


def check_boolean(mask: Tensor, *, name: str = "key_mask", meaning: str = "a key is present") -> None:
    """Raise ValueError unless the mask is boolean. The error tells what True means."""
    check_tensors(**{name: mask})
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be boolean, True where {meaning}, but is {mask.dtype}")


class MissingPackage(ModuleNotFoundError):
    """Says which package is missing, and the command that installs it."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn the import of a missing package into MissingPackage, which names this extra of linattn."""
    try:
        yield
    except ModuleNotFoundError as error:
        # a missing module of our own is a bug
        if error.name is None or error.name.partition(".")[0] == "linattn":
            raise
        command = f'pip install "linattn[{name}]"'
        raise MissingPackage(f"this needs {error.name}: {command} installs it", name=error.name) from error


def check_types(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function, or a constructor, raise ValueError for an argument that is not of the type that its annotation
    names: bool, int, float (NaN is none), str, None, a path, a function, unions and dicts of them, and tuples of them,
    with their lengths. Compiled graphs skip the check."""
    annotations = {name: each.annotation for name, each in inspect.signature(function).parameters.items()}
    names = tuple(annotations)

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            for name, value in (*zip(names, args, strict=False), *options.items()):
                check_type(name, value, annotations.get(name))
        return function(*args, **options)

    return checked


def check_fields(record: Any) -> None:
    """Raise ValueError for a field of a dataclass that is not of its annotated type."""
    for each in fields(record):
        check_type(each.name, getattr(record, each.name), each.type)


def check_type(name: str, value: object, annotation: Any) -> None:
    """Raise ValueError unless the value is of the annotated type. See `check_types` for the types that are checked."""
    if not _fits(value, annotation):
        raise ValueError(f"{name} must be {_described(annotation)}, but is {value!r}")


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", NoneType: "None"}
_KINDS: dict[Any, str] = {Callable: "a function", os.PathLike: "a path"}


def _fits(value: object, annotation: Any) -> bool:
    """Return whether the value is of the type; any value is of a type that is not checked."""
    if annotation in (int, float):
        kind = Integral if annotation is int else Real
        return isinstance(value, kind) and not isinstance(value, bool) and value == value
    if annotation in _NAMES:
        return isinstance(value, annotation)
    if isinstance(annotation, UnionType):
        return any(_fits(value, each) for each in get_args(annotation))
    if get_origin(annotation) is Callable:
        return callable(value)
    if get_origin(annotation) is os.PathLike:
        return isinstance(value, os.PathLike)
    if get_origin(annotation) is dict:
        return isinstance(value, dict) and all(all(map(_fits, item, get_args(annotation))) for item in value.items())
    if not _is_series(annotation):
        return True
    if not isinstance(value, Sequence) or isinstance(value, str) or _length(annotation) not in (None, len(value)):
        return False
    return all(_fits(x, get_args(annotation)[0]) for x in value)


def _is_series(annotation: Any) -> bool:
    return get_origin(annotation) in (tuple, Sequence) and get_args(annotation)[0] in _NAMES


def _length(annotation: Any) -> int | None:
    """Return the number of entries of a tuple[int, int], and None for a series of any length."""
    entries = get_args(annotation)
    return None if get_origin(annotation) is not tuple or Ellipsis in entries else len(entries)


def _described(annotation: Any) -> str:
    if isinstance(annotation, UnionType):
        return " or ".join(map(_described, get_args(annotation)))
    if _is_series(annotation):
        length = _length(annotation)
        kind = "a tuple" if length is None else f"a tuple of {length}"
        return f"{kind}, with each entry {_described(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        key, value = map(_described, get_args(annotation))
        return f"a dict, with each key {key} and each value {value}"
    return _KINDS.get(get_origin(annotation)) or _NAMES[annotation]
