import torch
import torch.distributed as dist

from linattn import distributed

# one process here; torchrun starts many
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
part = distributed.split_sequence(torch.arange(100).unsqueeze(0), group=group)
print(isinstance(part, distributed.SequencePart), part.key_mask)  # True None
dist.destroy_process_group()
