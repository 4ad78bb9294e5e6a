import torch

from linattn import states

x = torch.randn(2, 64)
y = states.restore(states.compress(x, torch.float16))
print(y.dtype, bool((x - y).abs().max() < 2e-3))  # torch.float32 True
