import torch

import linattn

attention = linattn.LocalAttention(window=10, causal=True)
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
y = attention(q, k, v)
v[:, :, 0] = 7  # the first token is out of sight of the 11th and all later ones
print(torch.equal(attention(q, k, v)[:, :, 10:], y[:, :, 10:]))  # True
