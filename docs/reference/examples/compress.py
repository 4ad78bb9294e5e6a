import torch

from linattn import LanguageModel, LanguageModelConfig, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
_, state = model.extend(torch.randint(257, (1, 100)))
print(states.num_bytes(state))  # 4368
print(states.num_bytes(states.compress(state, torch.int8)))  # 1376
