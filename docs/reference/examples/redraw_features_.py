import torch

import linattn

model = linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=256, dim=32, attention="favor")).eval()
tokens = torch.randint(256, (1, 20))
before = model(tokens)
linattn.redraw_features_(model, torch.Generator().manual_seed(0))
print(torch.equal(model(tokens), before))  # False
