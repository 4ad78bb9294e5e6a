"""Check what was read from JSON against type annotations, so that a damaged file is told in one line."""

from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

Record = TypeVar("Record")


def has_type(value: object, kind: Any) -> bool:
    """Tell whether a value of JSON is of a type. A whole number is a float too and a list a tuple; a bool is neither.

    The kinds are plain classes, unions, lists, tuples of any length, dicts with their values and typed dicts."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(has_type(value, each) for each in parts)
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(has_type(each, parts[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(has_type(each, parts[1]) for each in value.values())
    if is_typeddict(kind):
        return isinstance(value, dict) and not ill_typed(value, get_type_hints(kind))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)


def ill_typed(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[str]:
    """Return the names of the kinds whose values are missing or of another type."""
    return [name for name, kind in kinds.items() if name not in values or not has_type(values[name], kind)]


def typed(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Make a dataclass from values of JSON, where tuples are lists. Raise TypeError for one that is unknown, missing or
    of another type."""
    made = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    kinds = {each.name: each.type for each in fields(kind)}  # pyright: ignore[reportArgumentType]
    if wrong := ill_typed(vars(made), kinds):
        raise TypeError(f"{', '.join(f'{name} is {getattr(made, name)!r}' for name in wrong)} in its {kind.__name__}")
    return made
