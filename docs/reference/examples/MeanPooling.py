import torch

import linattn

attention = linattn.LinformerAttention(linattn.MeanPooling(max_length=100, projected_length=10))
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(attention(q, k, v).shape)  # torch.Size([1, 4, 100, 16])
