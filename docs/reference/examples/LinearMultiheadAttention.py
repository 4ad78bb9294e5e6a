import torch

import linattn

attention = linattn.LinearMultiheadAttention(32, 4, seq_len=512, proj_k=64)
x = torch.randn(100, 2, 32)  # tokens first, as nn.MultiheadAttention takes them
y, weights = attention(x, x, x)
print(y.shape, weights.shape)  # torch.Size([100, 2, 32]) torch.Size([2, 100, 64])
