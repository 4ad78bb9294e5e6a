import torch

from linattn import LanguageModel, LanguageModelConfig, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
_, short = model.extend(torch.randint(257, (1, 10)))
_, long = model.extend(torch.randint(257, (1, 1000)))
print(states.num_bytes(short), states.num_bytes(long))  # 4368 4368
