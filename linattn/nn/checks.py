"""Checks of tokens, the inputs of modules, made once at the boundary, so that errors show what the caller passed."""

import torch
from torch import Tensor

from linattn.checks import check_boolean


def check_tokens(x: Tensor, dim: int, key_mask: Tensor | None = None, *, name: str = "x") -> None:
    """Raise ValueError unless x is (b, n, dim) and its mask boolean (b, n)."""
    if x.ndim != 3 or x.shape[2] != dim:
        raise ValueError(f"{name} must be (b, n, {dim}), but is {tuple(x.shape)}")
    check_mask(x, key_mask, name=name)


def check_mask(x: Tensor, mask: Tensor | None, *, name: str = "x", starts: bool = False) -> None:
    """Raise ValueError unless a key mask, or a mask of `starts`, is boolean (b, n), or None."""
    if mask is None:
        return
    what, meaning = ("starts", "a sequence begins") if starts else ("key_mask", "a token is present")
    check_boolean(mask, name=what, meaning=meaning)
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
