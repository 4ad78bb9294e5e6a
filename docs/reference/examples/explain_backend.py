import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(linattn.explain_backend(q, k, v).splitlines()[0])  # triton: needs CUDA or XPU tensors, but they are on cpu
