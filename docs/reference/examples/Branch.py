import torch

import linattn

inner = linattn.named_attention("elu", num_heads=4, head_dim=8, causal=True)
layer = linattn.MultiheadAttention(32, 4, inner)
branch = linattn.Branch(layer, norm=torch.nn.LayerNorm(32), shift=linattn.TokenShift((0, 1)))
print(branch(torch.randn(2, 50, 32)).shape)  # torch.Size([2, 50, 32])
