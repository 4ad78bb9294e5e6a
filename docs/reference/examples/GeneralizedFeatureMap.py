import torch

import linattn

projection = linattn.RandomProjection(head_dim=16, num_rows=64)
attention = linattn.LinearAttention(linattn.GeneralizedFeatureMap(torch.relu, epsilon=1e-3, projection=projection))
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(attention(q, k, v).shape)  # torch.Size([1, 4, 100, 16])
