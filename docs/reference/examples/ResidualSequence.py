import torch

import linattn

branches = [linattn.Branch(linattn.MultiheadAttention(32, 4, "elu")), linattn.Branch(linattn.FeedForward(32, 128))]
print(linattn.ResidualSequence(branches)(torch.randn(2, 50, 32)).shape)  # torch.Size([2, 50, 32])
