import torch

import linattn

model = linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=256, dim=32, depth=1))
tokens = torch.randint(256, (2, 50))
loss = linattn.next_token_loss(model(tokens), tokens)
loss.backward()
print(loss.shape)  # torch.Size([])
