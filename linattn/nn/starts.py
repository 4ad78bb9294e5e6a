"""Packed rows: several sequences in one row, where a mask tells with which tokens they begin."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from linattn.types import TokenMask

# the age of a token whose sequence began before this call
UNKNOWN = 2**40


def ages(starts: Bool[Tensor, "b n"], key_mask: TokenMask = None) -> tuple[Int[Tensor, "b n"], Int[Tensor, " b"]]:
    """Return the number of tokens before each token in its sequence, and the same for a token that would follow the
    row. Missing tokens do not count. A sequence that began before the row has numbers of `UNKNOWN` or more."""
    present = torch.ones_like(starts) if key_mask is None else key_mask
    count = present.cumsum(1)
    before = count - present.long()
    first = torch.where(starts, before, -UNKNOWN)
    # a first column, so that there is one with no tokens too
    first = torch.cat([first.new_full((len(first), 1), -UNKNOWN), first], 1).cummax(1).values
    after = torch.cat([count.new_zeros(len(count), 1), count], 1)[:, -1] - first[:, -1]
    return before - first[:, 1:], after


def first_present(starts: Bool[Tensor, "b n"], key_mask: TokenMask = None) -> Bool[Tensor, "b n"]:
    """Return a mask that is True at the first present token of each sequence."""
    first = ages(starts, key_mask)[0] == 0
    return first if key_mask is None else first & key_mask
