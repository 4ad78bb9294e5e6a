"""Checks of options, for every layer, made once at the boundary, so that errors show what the caller passed."""

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def check_sizes(*, least: int = 1, **sizes: object) -> None:
    """Raise ValueError unless the sizes, or all of a tuple, are whole numbers of at least `least`."""
    for name, size in sizes.items():
        for each in size if isinstance(size, tuple) else (size,):
            if not isinstance(each, Integral) or isinstance(each, bool) or int(each) < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, but is {size!r}")


def check_numbers(*, least: float = 0.0, **numbers: object) -> None:
    """Raise ValueError unless the numbers are finite and at least `least`."""
    for name, number in numbers.items():
        if not isinstance(number, Real) or isinstance(number, bool) or not least <= float(number) < math.inf:
            raise ValueError(f"{name} must be a finite number of at least {least:g}, but is {number!r}")


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: option for name, option in options.items() if option is not None}


def check_boolean(mask: Tensor, *, name: str = "key_mask", meaning: str = "a key is present") -> None:
    """Raise ValueError unless the mask is boolean. The error tells what True means."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be boolean, True where {meaning}, but is {mask.dtype}")
