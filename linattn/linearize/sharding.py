"""Processes that share the weights that train (FSDP2): each holds a part of their values and gradients, and of the
optimizer's states.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from linattn.console.sharded_tensors import whole
from linattn.linearize.attention import linearized_layers


@contextmanager
def sharded(
    model: PreTrainedModel, groups: Sequence[dict[str, Any]]
) -> Iterator[tuple[PreTrainedModel, list[dict[str, Any]]]]:
    """Yield a copy of the model whose weights in the `groups` are distributed over all processes, and the groups with
    these weights. The model itself has no such weights inside the block, and the trained ones after it; all its other
    weights are also the copy's."""
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    names = {id(weight): name for name, weight in model.named_parameters()}
    weights = [weight for group in groups for weight in group["params"]]
    shards_of = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    fixed = {weight for weight in model.parameters() if id(weight) not in set(map(id, weights))}
    units = _units(shards_of, {names[id(weight)] for weight in weights})
    # the innermost first, and at last the model itself
    for module in reversed(list(shards_of.modules())):
        if module in units or module is shards_of:
            fully_shard(module, mesh=mesh, ignored_params=fixed)
    shards = {key: shards_of.get_parameter(name) for key, name in names.items()}
    if len([weight for weight in shards_of.parameters() if isinstance(weight, DTensor)]) != len(weights):
        raise ValueError("the weights of a model cannot be sharded if several of its layers have the same")
    for weight in weights:
        weight.data = weight.data.new_empty(0)
    with warnings.catch_warnings():
        # it warns of outputs that are views, but `transfer` does not change them
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        yield shards_of, [{**group, "params": [shards[id(weight)] for weight in group["params"]]} for group in groups]
    for weight in weights:
        weight.data = whole(shards[id(weight)].detach())


def _units(model: PreTrainedModel, trained: set[str]) -> set[nn.Module]:
    """Return the parts of a model that gather their weights one after another: the blocks with linear attention, or
    this attention itself if nothing else is `trained`, as `transfer` calls it alone."""
    linear = linearized_layers(model)
    if trained <= {f"{name}.{key}" for name, layer in linear.items() for key, _ in layer.named_parameters()}:
        return set(linear.values())
    layers, lists = set(linear.values()), [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {block for blocks in lists for block in blocks if layers & set(block.modules())}


def on_first(x: Any) -> Any:
    """Return a tensor with the parts of all processes on the first one, in memory of the CPU, and None on others."""
    if not isinstance(x, DTensor):
        return x
    y = x.full_tensor()
    return y.cpu() if dist.get_rank() == 0 else None
