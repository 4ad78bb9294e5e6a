import torch

import linattn

print(linattn.GatedFeedForward(32, 96)(torch.randn(2, 50, 32)).shape)  # torch.Size([2, 50, 32])
