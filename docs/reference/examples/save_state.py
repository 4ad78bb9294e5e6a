import torch

from linattn import LanguageModel, LanguageModelConfig, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
text = torch.randint(257, (1, 100))
_, state = model.extend(text)
states.save_state(state, "text.state", model=model, num_tokens=text.shape[1])
print(states.describe_state("text.state").num_tokens)  # 100
