import torch

import linattn

stack = linattn.ResidualSequence([linattn.Branch(linattn.FeedForward(64, 128))])
print(linattn.Projected(stack, in_dim=16, dim=64)(torch.randn(2, 50, 16)).shape)  # torch.Size([2, 50, 64])
