"""Reads JSON as a value of a declared type, so that a damaged file leads to an error of one line."""

from typing import Any


def read_json(kind: Any, text: str | bytes) -> Any:
    """Return `text` as a value of the type `kind`; a list becomes a tuple where the type has one. Raise ValueError that
    names what is missing or of another type: a whole number is a valid float, but a bool is no number. Unknown fields
    are ignored, unless `pydantic.with_config` forbids them."""
    # imported here, because `linattn --help` works without the extra
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": ") for each in error.errors())
        raise ValueError("; ".join(wrong)) from None
