"""Types of command-line arguments for argparse, each with an error that says what was expected."""

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any


def integer_from(least: int, most: float = math.inf) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            limit = f" and at most {most}" if most < math.inf else ""
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}{limit}, but is {text!r}")
        return value

    return integer


def number_where(allowed: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and allowed(value)):
            raise argparse.ArgumentTypeError(f"must be {expected}, but is {text!r}")
        return value

    return number


def base_or_none(text: str) -> float | None:
    return None if text == "none" else number_where(lambda x: x > 1, "a number above 1, or none")(text)


def comma_separated(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def repeatable(metavar: str) -> Mapping[str, Any]:
    """Let an option take one value at a time and be repeatable; one that takes several would swallow DATA too."""
    return {"action": "append", "metavar": metavar}


def one_of(*choices: str) -> Mapping[str, Any]:
    return {"choices": choices}


NATURAL: Mapping[str, Any] = {"type": integer_from(0), "metavar": "N"}
COUNT: Mapping[str, Any] = {"type": integer_from(1), "metavar": "N"}
SEED: Mapping[str, Any] = {"type": integer_from(0, 2**32 - 1), "metavar": "N"}
POSITIVE: Mapping[str, Any] = {"type": number_where(lambda x: x > 0, "a number above 0"), "metavar": "X"}
NOT_NEGATIVE: Mapping[str, Any] = {"type": number_where(lambda x: x >= 0, "a number of at least 0"), "metavar": "X"}
PART: Mapping[str, Any] = {"type": number_where(lambda x: 0 < x < 1, "a number between 0 and 1"), "metavar": "X"}
FLAG: Mapping[str, Any] = {"action": "store_true"}
SHARE: Mapping[str, Any] = {
    "type": number_where(lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "metavar": "X",
}
