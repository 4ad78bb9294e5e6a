import torch

import linattn

y = linattn.HeadNorm(16)(torch.randn(2, 4, 50, 16))
print(torch.allclose(y.square().mean(-1), torch.ones(2, 4, 50), atol=1e-3))  # True
