import torch

import linattn

inner = linattn.named_attention("elu", num_heads=4, head_dim=8, causal=True)
layer = linattn.MultiheadAttention(32, 4, inner)
branch = linattn.Branch(layer, shift=linattn.TokenShift((0, 1)))
_, state = branch.extend(torch.randn(2, 50, 32))
print(type(state).__name__, state.shift.shape)  # BranchState torch.Size([2, 1, 32])
