import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
_, state = linattn.causal_linear_attention(q.exp(), k.exp(), v)
half = linattn.LinearState(state.S / 2, state.z / 2)  # a past that counts half
print(half.S.shape, half.z.shape)  # torch.Size([1, 4, 16, 16]) torch.Size([1, 4, 16])
