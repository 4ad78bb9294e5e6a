"""Tensor parallelism: each process computes some of the heads of every attention and some of the hidden units of every
feed-forward layer. Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053, section 3"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from linattn.distributed.parts import process_group
from linattn.distributed.plan import Plan
from linattn.distributed.shares import compute_globally, compute_locally, over_ranks, summed


@dataclass
class TensorSharding:
    """Records the changes of `tensor_parallel` to a model, which is shared by the ranks of the `mesh`. `layers` has the
    name of each attention and feed-forward layer of which every rank computes its share."""

    mesh: DeviceMesh
    layers: list[str]
    _changes: list[Callable[[], object]] = field(init=False, repr=False, default_factory=list)

    def undo(self) -> None:
        """Give every rank the whole model again, with new parameters of the same values."""
        for undo in reversed(self._changes):
            undo()
        self._changes = []

    def __str__(self) -> str:
        return f"{len(self.layers)} layers over {self.mesh.size()} ranks"


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> TensorSharding:
    """Share the heads of every attention, and the hidden units of every feed-forward layer, among the ranks of a
    one-dimensional `mesh`, in place: each rank computes with its own, and their outputs are summed.

    Call it on every rank with the same `model`, before `fully_shard`, `torch.compile` and the optimizer. The model
    takes and returns the same as before, on all ranks, but a state has the heads of its rank only. Each parameter
    becomes a DTensor with the same shape and name, and with the values of the first rank: sharded if it belongs to
    heads or hidden units, replicated if not. Each part of a mixture is shared: with two ranks, "local:2+elu:2" gives
    each of them one local and one elu head. Norms, embeddings and other layers without heads are computed on every
    rank.

    All ranks must draw the same random numbers, for example for dropout. Raises ValueError, before anything changes, if
    the number of ranks does not divide the heads of a part or the hidden units, and for an attention whose heads no
    rule says how to share."""
    if not isinstance(mesh, DeviceMesh):
        kind = type(mesh).__name__
        raise ValueError(f"a mesh of one dimension is needed, such as mesh['tp'], but this is a {kind}")
    process_group(mesh)
    if any(isinstance(tensor, DTensor) for tensor in model.parameters()):
        raise ValueError("the parameters are DTensors already: call tensor_parallel once, and before fully_shard")
    plan = Plan(model, mesh)
    if not plan.layers:
        raise ValueError("the model has no MultiheadAttention and no feed-forward layer of linattn: nothing to share")
    _distribute(model, plan)
    sharding = TensorSharding(mesh, plan.layers)
    sharding._changes = [partial(_gather, model), *_change_modules(plan)]
    return sharding


def _distribute(model: nn.Module, plan: Plan) -> None:
    """Make DTensors of the model's parameters, and copy the buffers to all ranks, both with the values of the first
    rank."""
    parameters = {
        old: nn.Parameter(distribute_tensor(old.detach(), plan.mesh, [placement]), requires_grad=old.requires_grad)
        for old, placement in plan.placements.items()
    }
    _exchange(model, parameters)
    for buffer in model.buffers():
        if buffer.numel() and not buffer.is_meta:
            dist.broadcast(buffer, group=plan.mesh.get_group(), group_src=0)


def _gather(model: nn.Module) -> None:
    """Make ordinary parameters of the DTensors."""
    shards = [x for x in model.parameters() if isinstance(x, DTensor)]
    _exchange(model, {x: nn.Parameter(x.full_tensor().detach(), requires_grad=x.requires_grad) for x in shards})


def _exchange(model: nn.Module, parameters: dict[Any, nn.Parameter]) -> None:
    """Replace the parameters of a model that are keys of the dictionary by the values."""
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old in parameters:
                module._parameters[name] = parameters[old]


def _change_modules(plan: Plan) -> list[Callable[[], object]]:
    """Make the modules compute with the shares of this rank. Return functions that undo these changes."""
    changes: list[Callable[[], object]] = []
    for module, shares, mesh in plan.shares:
        compute_locally(module, shares, mesh)
        changes.append(partial(compute_globally, module))
    changes += [layer.register_forward_hook(partial(_sum_outputs, plan.mesh)).remove for layer in plan.last]
    for norm in plan.norms:
        norm.over_ranks = partial(over_ranks, mesh=plan.mesh)
        changes.append(partial(delattr, norm, "over_ranks"))
    for mixture in plan.mixtures:
        changes.append(partial(setattr, mixture, "heads", mixture.heads))
        mixture.heads = tuple(heads // plan.mesh.size() for heads in mixture.heads)
    return changes


def _sum_outputs(mesh: DeviceMesh, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return summed(output, mesh)
