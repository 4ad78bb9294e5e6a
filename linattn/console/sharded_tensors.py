"""Tensors of which each process has a part (DTensors), and the same tensors as a whole."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(x: Any) -> Any:
    """Return a tensor with the parts of all processes. Other objects are returned as they are."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def distributed_as(x: Tensor, weight: Tensor) -> Tensor:
    """Return x, which all processes have, distributed as the `weight` is; as it is if it has another shape."""
    if not isinstance(weight, DTensor) or x.shape != weight.shape:
        return x
    # no process sends anything, as all have the same
    return distribute_tensor(x.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)
