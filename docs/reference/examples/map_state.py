import torch

import linattn

attention = linattn.LinearAttention(linattn.TaylorFeatureMap(), causal=True)
q, k, v = torch.randn(3, 2, 4, 100, 16)
_, state = attention.extend(q, k, v)
# the past of the second sequence, twice
twice = linattn.map_state(lambda tensor: tensor[[1, 1]], state)
print(twice.sums.S.shape)  # torch.Size([2, 4, 1, 17, 16])
