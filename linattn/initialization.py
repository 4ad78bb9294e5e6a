"""Initial values that follow from a number's place in a tensor, also where processes have a part of the tensor each."""

import torch
from torch import Tensor


def places(x: Tensor, dim: int = 0) -> Tensor:
    """Return for each number of x its index along `dim`, at least in float32, as a DTensor if x is one."""
    return torch.ones_like(x, dtype=torch.promote_types(x.dtype, torch.float32)).cumsum(dim) - 1


@torch.no_grad()
def assign(x: Tensor, values: Tensor) -> None:
    """Copy `values` into x; both are DTensors, or neither."""
    # torch copies a number, but no vector with one, into a sharded vector
    x.copy_(values.squeeze(0))
