import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
inner = linattn.LinearAttention(linattn.TaylorFeatureMap(), causal=True)
weights = linattn.attention_weights(inner, q, k)
print(weights.shape, torch.allclose(weights @ v, inner(q, k, v), atol=1e-5))  # torch.Size([1, 4, 100, 100]) True
