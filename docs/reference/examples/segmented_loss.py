import torch
import torch.nn.functional as F

from linattn import LanguageModel, LanguageModelConfig, states

model = LanguageModel(LanguageModelConfig(vocab_size=257, dim=32, depth=2, num_heads=2, attention="elu"))
tokens = torch.randint(257, (1, 500))
loss, state = states.segmented_loss(model, tokens, segment=100)
loss.backward()
whole = F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
print(torch.allclose(loss, whole, rtol=1e-4))  # True
