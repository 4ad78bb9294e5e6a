"""Each rank's share of a tensor in tensor parallelism, and the two sums over ranks: of outputs, and of gradients.
Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053, section 3

A weight is a DTensor, as in torch's `parallelize_module`, so optimizers, FSDP2 and distributed checkpoints know it. The
modules compute with plain tensors: while a method runs, an attribute of the module hides the DTensor of that name."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from linattn.ops.numerics import accumulator

Ranges = tuple[tuple[int, int], ...]
"""Each a start and a length."""

# the methods of modules in which weights are used
METHODS = ("forward", "extend", "summarize", "read", "logits")


class Share(NamedTuple):
    """The parameter or buffer `name` of the module `owner`, and the function from it to the tensor for this rank."""

    owner: nn.Module
    name: str
    local: Callable[[Any], Tensor]


def own_shard(weight: DTensor) -> Tensor:
    """Return the shard of this rank."""
    return weight.to_local()


def own_ranges(weight: DTensor, dim: int, ranges: Ranges) -> Tensor:
    """Return the ranges of `dim` that this rank uses. They are not the shard that it stores, so each call gathers the
    whole weight, and the backward pass scatters its gradient."""
    if torch.is_grad_enabled():
        return slices(_gathered(weight), dim, ranges)
    # without gradients, torch 2.11 cannot gather a weight that asks for them
    with torch.inference_mode(False), torch.enable_grad():
        whole = _gathered(weight)
    return slices(whole.detach(), dim, ranges)


def _gathered(weight: DTensor) -> Tensor:
    return weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def slices(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Return the ranges of a tensor, one after the other."""
    return torch.cat([x.narrow(dim, start, length) for start, length in ranges], dim)


def for_own_heads(weight: DTensor) -> Tensor:
    """Return a weight that all heads share. The gradient on each rank is from the rank's own heads, so the gradients
    are summed."""
    return gradients_summed(weight.to_local(), weight.device_mesh)


def on_first_rank(weight: DTensor) -> Tensor:
    """Return a bias on the first rank and zeros on the others, as the outputs of all ranks are summed."""
    return for_own_heads(weight) * float(weight.device_mesh.get_local_rank() == 0)


def gradients_summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x, whose gradient is the sum over ranks, in float32 or better."""
    wide = DTensor.from_local(x.to(accumulator(x.dtype)), mesh, [Replicate()], run_check=False)
    return wide.to_local(grad_placements=[Partial()]).to(x.dtype)


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of x over ranks, in float32 or better. The gradient of x is that of the sum."""
    wide = DTensor.from_local(x.to(accumulator(x.dtype)), mesh, [Partial()], run_check=False)
    return wide.redistribute(placements=[Replicate()]).to_local().to(x.dtype)


def over_ranks(x: Tensor, reduction: str, mesh: DeviceMesh) -> Tensor:
    """Return the "max" of x over ranks, without a gradient, or the "mean"."""
    if reduction == "max":
        return DTensor.from_local(x, mesh, [Partial("max")], run_check=False).full_tensor()
    return gradients_summed(summed(x, mesh), mesh) / mesh.size()


@contextmanager
def local_tensors(shares: Iterable[Share]) -> Iterator[None]:
    """Make the attributes of modules the tensors of this rank, until the end of the context."""
    hidden = []
    try:
        for owner, name, local in shares:
            # a method calls another, or a module of the model is in use in two places
            if name not in owner.__dict__:
                tensors = owner._parameters if name in owner._parameters else owner._buffers
                object.__setattr__(owner, name, local(tensors[name]))
                hidden.append((owner, name))
        yield
    finally:
        for owner, name in hidden:
            del owner.__dict__[name]


def compute_locally(module: nn.Module, shares: list[Share], mesh: DeviceMesh | None = None) -> None:
    """Make the methods of a module, in place, compute with the shares of this rank. With a `mesh`, each of its ranks
    computes a part of the gradient of the inputs, and these parts are summed."""
    module.__class__ = _local_kind(type(module))
    module.__dict__.update(_shares=shares, _mesh=mesh)


def compute_globally(module: nn.Module) -> None:
    """Make the methods of a module compute with whole tensors again, as before `compute_locally`."""
    module.__class__ = cast(Any, type(module).__base__)
    del module.__dict__["_shares"], module.__dict__["_mesh"]


# modules of one class keep a common class, so that torch.compile has one graph for all blocks
@cache
def _local_kind(kind: type[nn.Module]) -> Any:
    methods = {name: _local(getattr(kind, name)) for name in METHODS if hasattr(kind, name)}
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})


def _local(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def local_method(self: Any, *args: Any, **options: Any) -> Any:
        if self._mesh is not None:
            args = tuple(_input(x, self._mesh) for x in args)
            options = {name: _input(x, self._mesh) for name, x in options.items()}
        with local_tensors(self._shares):
            return method(self, *args, **options)

    return local_method


def _input(x: Any, mesh: DeviceMesh) -> Any:
    """Return an argument of a method. A state is a tuple: it belongs to the rank's heads already."""
    return gradients_summed(x, mesh) if isinstance(x, Tensor) and x.is_floating_point() else x
