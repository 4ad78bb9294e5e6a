"""Checks of the inputs of modules, made once at the boundary, so that errors show what the caller passed."""

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


def check_tokens(x: Tensor, dim: int, key_mask: Tensor | None = None, *, name: str = "x") -> None:
    """Raise ValueError unless x is (b, n, dim) and its mask boolean (b, n)."""
    if x.ndim != 3 or x.shape[2] != dim:
        raise ValueError(f"{name} must be (b, n, {dim}), but is {tuple(x.shape)}")
    check_mask(x, key_mask, name=name)


def check_mask(x: Tensor, mask: Tensor | None, *, name: str = "x", starts: bool = False) -> None:
    """Raise ValueError unless a key mask, or a mask of `starts`, is boolean (b, n), or None."""
    if mask is None:
        return
    what, where = ("starts", "a sequence begins") if starts else ("key_mask", "a token is present")
    if mask.dtype != torch.bool:
        raise ValueError(f"{what} must be boolean, True where {where}, but is {mask.dtype}")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{what} must be {tuple(x.shape[:2])}, as {name}, but is {tuple(mask.shape)}")


def check_indices(tokens: Tensor, key_mask: Tensor | None) -> None:
    """Raise ValueError unless tokens are integers (b, n) and their mask boolean (b, n)."""
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens must be integers (b, n), but are {tokens.dtype} {tuple(tokens.shape)}")
    check_mask(tokens, key_mask, name="tokens")


def out_of_range(what: str, indices: Tensor, size: int) -> ValueError:
    """Return the error for a table of `size` rows that does not have all the indices."""
    return ValueError(f"{what} must be in [0, {size}), but go from {int(indices.min())} to {int(indices.max())}")
