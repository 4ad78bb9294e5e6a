"""linattn, on an Accelerate that shards on CPUs as it does on GPUs: nothing but a list of device types forbids it."""

import sys
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from linattn.cli import training
from linattn.cli.main import main

make = AcceleratorState.__init__


def make_sharding(self: AcceleratorState, *positional: Any, **named: Any) -> None:
    make(self, *positional, **named)
    plugin = named.get("fsdp_plugin") or self.__dict__.get("fsdp_plugin")
    if self.distributed_type == DistributedType.MULTI_CPU and plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin


if __name__ == "__main__":
    AcceleratorState.__init__ = make_sharding
    training.can_shard = lambda args: args.world_size > 1
    sys.exit(main(sys.argv[1:]))
