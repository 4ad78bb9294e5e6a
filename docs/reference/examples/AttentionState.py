import torch

import linattn

inner = linattn.named_attention("elu", num_heads=4, head_dim=8, causal=True)
layer = linattn.MultiheadAttention(32, 4, inner, convolution=3)
_, state = layer.extend(torch.randn(2, 50, 32))
print(type(state).__name__, state.convolution.shape)  # AttentionState torch.Size([2, 2, 32])
