import torch.distributed as dist

import linattn
from linattn import distributed

# one process here; torchrun starts many
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
model = linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=256, dim=32, depth=2, attention="gated_delta"))
sharding = distributed.shard_sequence(model, group)
assert isinstance(sharding, distributed.SequenceSharding)
print(sharding.engine, sharding.layers)  # wave ['blocks.0.mixer.inner', 'blocks.1.mixer.inner']
dist.destroy_process_group()
