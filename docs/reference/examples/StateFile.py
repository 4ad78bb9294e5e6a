import torch

from linattn import LanguageModel, LanguageModelConfig, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
states.save_state(model.extend(torch.randint(257, (2, 100)))[1], "text.state", model=model)
described = states.describe_state("text.state")
print(type(described) is states.StateFile, described.model)  # True LanguageModel
