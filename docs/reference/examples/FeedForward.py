import torch

import linattn

print(linattn.FeedForward(32, 128, activation=torch.relu)(torch.randn(2, 50, 32)).shape)  # torch.Size([2, 50, 32])
