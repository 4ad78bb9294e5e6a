import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
attention = linattn.LinearAttention(linattn.SecondOrderTaylorFeatureMap())
s = q @ k.mT / 4
weights = 1 + s + s.square() / 2
print(torch.allclose(attention(q, k, v), weights / weights.sum(-1, keepdim=True) @ v, atol=1e-5))  # True
