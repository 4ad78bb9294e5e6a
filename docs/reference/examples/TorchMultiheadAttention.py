import torch

import linattn

attention = linattn.TorchMultiheadAttention(32, 4, batch_first=True, inner="elu")
x = torch.randn(2, 100, 32)
y, _ = attention(x, x, x, need_weights=False)
print(y.shape)  # torch.Size([2, 100, 32])
