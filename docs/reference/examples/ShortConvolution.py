import torch

import linattn

convolution = linattn.ShortConvolution(32, width=4)
x = torch.randn(2, 50, 32)
first, state = convolution.extend(x[:, :20])
rest, state = convolution.extend(x[:, 20:], state)
print(torch.allclose(torch.cat([first, rest], 1), convolution(x), atol=1e-6))  # True
