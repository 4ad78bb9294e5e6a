import torch

import linattn

norm = linattn.ScaleNorm(32)
y = norm(torch.randn(2, 50, 32))
print(torch.allclose(y.norm(dim=-1), norm.g.expand(2, 50), atol=1e-4))  # True
