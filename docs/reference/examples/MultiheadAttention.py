import torch

import linattn

inner = linattn.named_attention("local:2+elu:2", num_heads=4, head_dim=16, window=10, causal=True)
layer = linattn.MultiheadAttention(64, 4, inner, rotary=10_000.0, convolution=4)
x = torch.randn(2, 100, 64)
first, state = layer.extend(x[:, :60])
rest, state = layer.extend(x[:, 60:], state)
print(torch.allclose(torch.cat([first, rest], 1), layer(x), atol=1e-5))  # True
