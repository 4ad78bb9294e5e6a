import torch

import linattn

projection = linattn.LearnedProjection(max_length=512, projected_length=32)
attention = linattn.LinformerAttention(projection)
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
# a sequence may be shorter than max_length
print(attention(q, k, v).shape)  # torch.Size([1, 4, 100, 16])
