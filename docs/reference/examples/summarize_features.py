import torch

import linattn

k, v = torch.randn(2, 1, 4, 1000, 16)
state = linattn.summarize_features(linattn.Features(100 * k, function="exp"), v)
print(state.sums.S.shape, state.log_scale.shape)  # torch.Size([1, 4, 16, 16]) torch.Size([1, 4, 1])
