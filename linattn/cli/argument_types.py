"""Types of command-line arguments for argparse, each with an error that says what was expected."""

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from linattn.attention.named import ATTENTIONS, names_in
from linattn.names import unknown_name

Parsing = dict[str, Any]
"""Keywords of argparse's `add_argument`."""


def checked(convert: Callable[[str], Any], allowed: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """Return a converter of texts. It refuses infinite numbers and numbers that `allowed` refuses, with the error "must
    be `expected`"."""

    def number(text: str) -> Any:
        with suppress(ValueError):
            # NaN compares false with everything
            if -math.inf < (value := convert(text)) < math.inf and allowed(value):
                return value
        raise argparse.ArgumentTypeError(f"must be {expected}, but is {text!r}")

    return number


def integer_from(least: int, most: float = math.inf) -> Callable[[str], int]:
    limit = f" and at most {most}" if most < math.inf else ""
    return checked(int, lambda x: least <= x <= most, f"a whole number of at least {least}{limit}")


def base_or_none(text: str) -> float | None:
    return None if text == "none" else checked(float, lambda x: x > 1, "a number above 1, or none")(text)


def comma_separated(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclass(frozen=True)
class Names:
    """Converts a name, or with `several` names with commas between. `check` raises ValueError for a wrong name; `known`
    lists the right ones."""

    known: Sequence[str]
    check: Callable[[str], object]
    several: bool = True

    def __call__(self, text: str) -> str | tuple[str, ...]:
        names = comma_separated(text) if self.several else (text,)
        try:
            for name in names:
                self.check(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return names if self.several else text


def names_from(known: Sequence[str]) -> Names:
    def check(name: str) -> None:
        if name not in known:
            raise unknown_name("each", name, known)

    return Names(known, check)


# an attention may be a mixture
METHOD = Names(tuple(ATTENTIONS), names_in, several=False)
METHODS = replace(METHOD, several=True)
# a layer may be a gated convolution instead; the configuration checks its width
LAYERS = Names(METHODS.known, lambda name: name.startswith("convolution:") or names_in(name))


def counts(text: str) -> tuple[int, ...]:
    """Convert numbers with commas between; they are sorted, and each is kept once."""
    return tuple(sorted({integer_from(1)(part) for part in comma_separated(text)}))


def integers(least: int, most: float = math.inf) -> Parsing:
    return {"type": integer_from(least, most), "metavar": "N"}


def numbers(allowed: Callable[[float], bool], expected: str) -> Parsing:
    return {"type": checked(float, allowed, f"a number {expected}"), "metavar": "X"}


def repeatable(metavar: str) -> Parsing:
    """Return argparse's keywords for an option that is repeated, once per value. (An option of several values would
    also take the DATA after it as values.)"""
    return {"action": "append", "metavar": metavar}


FLAG: Parsing = {"action": "store_true"}
NATURAL, COUNT, SEED = integers(0), integers(1), integers(0, 2**32 - 1)
POSITIVE = numbers(lambda x: x > 0, "above 0")
NOT_NEGATIVE = numbers(lambda x: x >= 0, "of at least 0")
PART = numbers(lambda x: 0 < x < 1, "between 0 and 1")
SHARE = numbers(lambda x: 0 < x <= 1, "above 0 and at most 1")
