import torch

import linattn

print(linattn.PositionLinearAttention(64)(torch.randn(2, 64, 10, 12)).shape)  # torch.Size([2, 64, 10, 12])
