import torch

import linattn

k, v = torch.randn(2, 1, 4, 1000, 16)
state = linattn.summarize(k, v, feature_map="softplus")
print(state.S.shape, state.z.shape)  # torch.Size([1, 4, 16, 16]) torch.Size([1, 4, 16])
