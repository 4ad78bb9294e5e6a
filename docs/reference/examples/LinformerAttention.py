import torch

import linattn

# keys and values share one projection; give a second one for the values
attention = linattn.LinformerAttention(linattn.LearnedProjection(512, 32), linattn.LearnedProjection(512, 32))
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(attention(q, k, v).shape)  # torch.Size([1, 4, 100, 16])
