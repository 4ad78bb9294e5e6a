import torch
import torch.distributed as dist

from linattn import distributed

# one process here; torchrun starts many
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
q, k, v = torch.rand(3, 2, 4, 100, 8).unbind()
y, state = distributed.sharded_linear_attention(q, k, v, group=group, feature_map="elu_plus_one")
print(y.shape, state.S.shape)  # torch.Size([2, 4, 100, 8]) torch.Size([2, 4, 8, 8])
dist.destroy_process_group()
