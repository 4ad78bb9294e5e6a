import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
attention = linattn.LinearAttention(linattn.ScaledFeatureMap(), normalize=None)
print(torch.allclose(attention(q, k, v), q @ k.mT @ v / 4, atol=1e-4))  # True
