import torch

import linattn

attention = linattn.FlooredFavorAttention(linattn.FavorFeatureMap(16, 32), epsilon=1e-4, causal=True)
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(attention(q, k, v).shape)  # torch.Size([1, 4, 100, 16])
