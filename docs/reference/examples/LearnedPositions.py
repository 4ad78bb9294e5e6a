import torch

import linattn

positions = linattn.LearnedPositions(max_length=512, dim=32)
print(positions(torch.arange(50)).shape)  # torch.Size([50, 32])
