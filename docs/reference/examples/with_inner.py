import torch

import linattn

theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
ours = linattn.with_inner(theirs, "softmax")
x = torch.randn(2, 100, 32)
print(torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6))  # True
