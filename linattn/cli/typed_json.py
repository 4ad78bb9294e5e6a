"""Reads JSON as a value of a declared type, so that a damaged file is told in one line."""

from typing import Any

from pydantic import TypeAdapter, ValidationError


def read_json(kind: Any, text: str | bytes) -> Any:
    """Return a value of the type, whose tuples are lists in JSON. Raise ValueError with what is missing or of another
    type; a whole number is a float too, and a bool is no number. What the type does not know is left out, unless
    `pydantic.with_config` says otherwise."""
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, each['loc'])) or 'it'}: {each['msg']}" for each in error.errors())
        raise ValueError("; ".join(wrong)) from None
