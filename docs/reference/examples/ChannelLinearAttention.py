import torch

import linattn

print(linattn.ChannelLinearAttention()(torch.randn(2, 64, 10, 12)).shape)  # torch.Size([2, 64, 10, 12])
