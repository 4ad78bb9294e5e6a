import torch

import linattn

attention = linattn.ImageLinearAttention(chan=64, heads=4, key_dim=16, value_dim=16)
print(attention(torch.randn(2, 64, 20, 24)).shape)  # torch.Size([2, 64, 20, 24])
