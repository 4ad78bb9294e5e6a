import torch

import linattn

print(linattn.SinusoidalPositions(32)(torch.arange(50)).shape)  # torch.Size([50, 32])
