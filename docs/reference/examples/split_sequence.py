import torch
import torch.distributed as dist

from linattn import distributed

# one process here; torchrun starts many
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
tokens = torch.tensor([[5, 6, 7, 8]])
part = distributed.split_sequence(tokens, group=group)
print(part.tokens.tolist(), part.labels.tolist())  # [[5, 6, 7, 8]] [[6, 7, 8, -100]]
dist.destroy_process_group()
