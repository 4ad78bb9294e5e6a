import torch

import linattn

attention = linattn.LinearAttention(linattn.EfficientFeatureMap())
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
wanted = q.softmax(-1) @ (k.softmax(-2).mT @ v)
print(torch.allclose(attention(q, k, v), wanted, atol=1e-5))  # True
