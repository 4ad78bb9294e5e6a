import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from linattn import FeedForward
from linattn.distributed import TensorSharding, tensor_parallel

# torchrun starts one process per device, which need neither a store nor a rank
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = FeedForward(8, 32)
sharding: TensorSharding = tensor_parallel(module, init_device_mesh("cpu", (1,)))

print(type(module.up_proj.weight).__name__)  # DTensor

sharding.undo()

print(type(module.up_proj.weight).__name__)  # Parameter

dist.destroy_process_group()
