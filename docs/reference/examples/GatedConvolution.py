import torch

import linattn

layer = linattn.GatedConvolution(32, width=3)
x = torch.randn(2, 50, 32)
y, state = layer.extend(x[:, :49])
last, state = layer.extend(x[:, 49:], state)
print(torch.allclose(torch.cat([y, last], 1), layer(x), atol=1e-6))  # True
