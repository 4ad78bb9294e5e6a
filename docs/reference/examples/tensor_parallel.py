import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from linattn import LanguageModel, LanguageModelConfig
from linattn.distributed import tensor_parallel

# torchrun starts one process per device, which need neither a store nor a rank
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = LanguageModel(LanguageModelConfig(vocab_size=100, dim=32, depth=2, num_heads=4, attention="local:2+elu:2"))
sharding = tensor_parallel(model, init_device_mesh("cpu", (1,)))

print(sharding)  # 4 layers over 1 ranks
print(model.blocks[0].mixer.q_proj.weight.placements)  # (Shard(dim=0),)

dist.destroy_process_group()
