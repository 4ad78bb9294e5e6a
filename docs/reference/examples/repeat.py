import torch

from linattn import LanguageModel, LanguageModelConfig, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
_, state = model.extend(torch.randint(257, (1, 10)))
forks = states.repeat(state, 3)
logits, forks = model.extend(torch.tensor([[1], [2], [3]]), forks)
print(tuple(logits.shape))  # (3, 1, 257)
