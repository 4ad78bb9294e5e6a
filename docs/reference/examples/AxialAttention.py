import torch

import linattn

# 6 rows of 8 pixels: each pixel attends along its column, then along its row
attention = linattn.AxialAttention(linattn.SoftmaxAttention(), window=8)
q, k, v = torch.randn(3, 1, 4, 48, 16)
print(attention(q, k, v).shape)  # torch.Size([1, 4, 48, 16])
