import torch

import linattn

local = linattn.LocalAttention(window=10, causal=True)
linear = linattn.LinearAttention(linattn.TaylorFeatureMap(), causal=True)
attention = linattn.SplitHeads((1, local), (3, linear))
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(torch.equal(attention(q, k, v)[:, :1], local(q[:, :1], k[:, :1], v[:, :1])))  # True
