import torch

from linattn import LanguageModel, LanguageModelConfig, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
_, state = model.extend(torch.randint(257, (1, 10)))
logits, _ = model.double().extend(torch.tensor([[1]]), states.to(state, dtype=torch.float64))
print(logits.dtype)  # torch.float64
