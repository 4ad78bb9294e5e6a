import torch
import torch.distributed as dist

from linattn import distributed

# one process here; torchrun starts many
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
q, k, v = torch.nn.functional.normalize(torch.rand(3, 2, 4, 100, 8), dim=-1).unbind()
y, state = distributed.sharded_delta_attention(q, k, v, torch.rand(2, 4, 100), group=group)
print(y.shape, state.shape)  # torch.Size([2, 4, 100, 8]) torch.Size([2, 4, 8, 8])
dist.destroy_process_group()
