import torch

import linattn

config = linattn.LanguageModelConfig(vocab_size=256, dim=64, depth=2, attention="local+elu")
model = linattn.LanguageModel(config).eval()
tokens = torch.randint(256, (1, 50))
logits = model(tokens)
# the same, as a recurrent network
first, state = model.extend(tokens[:, :49])
last, state = model.extend(tokens[:, 49:], state)
print(logits.shape, torch.allclose(last, logits[:, 49:], atol=1e-4))  # torch.Size([1, 50, 256]) True
