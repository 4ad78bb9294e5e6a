import torch

import linattn

attention = linattn.LinearAttention(linattn.ElementwiseFeatureMap("relu"))
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
similarity = q.relu() @ k.relu().mT
print(torch.allclose(attention(q, k, v), similarity / similarity.sum(-1, keepdim=True) @ v, atol=1e-5))  # True
