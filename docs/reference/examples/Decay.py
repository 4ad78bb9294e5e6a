import torch

import linattn

decay = linattn.Decay(num_key_heads=4)
attention = linattn.LinearAttention(linattn.ElementwiseFeatureMap("elu_plus_one"), causal=True, decay=decay)
print(decay().exp().flatten())  # tensor([0.9688, 0.9844, 0.9922, 0.9961])
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(attention(q, k, v).shape)  # torch.Size([1, 4, 100, 16])
