import torch

from linattn import LanguageModel, LanguageModelConfig, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
_, state = model.extend(torch.randint(257, (1, 100)))
states.save_state(state, "text.state", model=model)
logits, _ = model.extend(torch.tensor([[1]]), states.load_state("text.state", model=model))
print(torch.equal(logits, model.extend(torch.tensor([[1]]), state)[0]))  # True
