import torch

import linattn

attention = linattn.LinearAttention(linattn.HyperbolicFavorFeatureMap(16, 64), causal=True)
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(attention(q, k, v).shape)  # torch.Size([1, 4, 100, 16])
