import torch

import linattn

print(linattn.named_attention("gated_delta", num_heads=2, head_dim=8, causal=True).needs.decay)  # head
# any feature map may fade by a gate per key head and token
needs = linattn.GateNeeds(decay="head")
attention = linattn.LinearAttention(linattn.ElementwiseFeatureMap("elu_plus_one"), causal=True, needs=needs)
q, k, v = torch.randn(3, 1, 2, 10, 8)
forgets = linattn.Gates(log_decay=torch.full((1, 2, 10), -torch.inf))
print(torch.allclose(attention(q, k, v, gates=forgets), v))  # True
