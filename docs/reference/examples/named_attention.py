import torch

import linattn

inner = linattn.named_attention("local:1+taylor:3", num_heads=4, head_dim=16, window=10, causal=True)
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(type(inner).__name__, inner(q, k, v).shape)  # SplitHeads torch.Size([1, 4, 100, 16])
