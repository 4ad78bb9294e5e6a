import torch
import torch.distributed as dist

import linattn
from linattn import distributed

# one process here; torchrun starts many
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
model = linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=256, dim=32, depth=2, attention="gated_delta"))
tokens, sharding = torch.randint(256, (1, 100)), distributed.shard_sequence(model, group)
_, state = model.extend(tokens)
state = distributed.last_state(state, group=group)
sharding.undo()
print(model.extend(tokens[:, :1], state)[0].shape)  # torch.Size([1, 1, 256])
dist.destroy_process_group()
