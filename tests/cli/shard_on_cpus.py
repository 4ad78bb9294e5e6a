"""Accelerate shards on CPUs as it does on GPUs: nothing but a list of device types forbids it."""

from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from linattn.cli import training

make = AcceleratorState.__init__


def make_sharding(self: AcceleratorState, *positional: Any, **named: Any) -> None:
    make(self, *positional, **named)
    plugin = named.get("fsdp_plugin") or self.__dict__.get("fsdp_plugin")
    if self.distributed_type == DistributedType.MULTI_CPU and plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin


def shard_on_cpus() -> None:
    """Change Accelerate in this process."""
    AcceleratorState.__init__ = make_sharding
    training.can_shard = lambda args: args.world_size > 1
