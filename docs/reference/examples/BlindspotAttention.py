import torch

import linattn

inner = linattn.LinearAttention(linattn.ElementwiseFeatureMap("elu_plus_one"), causal=True)
attention = linattn.BlindspotAttention(inner, size=10)
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
y = attention(q, k, v)
k[:, :, 20:30] = 7  # the queries of a block do not see the keys of their own block
print(torch.equal(attention(q, k, v)[:, :, :30], y[:, :, :30]))  # True
