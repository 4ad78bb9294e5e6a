import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
attention = linattn.LinearAttention(linattn.TaylorFeatureMap())
weights = 1 + torch.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1)
print(torch.allclose(attention(q, k, v), weights / weights.sum(-1, keepdim=True) @ v, atol=1e-5))  # True
