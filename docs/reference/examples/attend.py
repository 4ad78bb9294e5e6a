import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(linattn.attend(q, k, v, "elu", is_causal=True).shape)  # torch.Size([1, 4, 100, 16])
