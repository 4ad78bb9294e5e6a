import torch

from linattn import LanguageModel, LanguageModelConfig, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
_, state = model.extend(torch.randint(257, (3, 10)))
print(states.count_rows(states.select(state, [2, 0])))  # 2
