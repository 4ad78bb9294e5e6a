import torch

import linattn

# Mamba-2's scan: a step per head and token multiplies the value, and makes the past fade
attention = linattn.named_attention("ssd", num_heads=1, head_dim=1, causal=True)
x = torch.ones(1, 1, 3, 1)
step = torch.tensor([1.0, 1.0, 2.0]).reshape(1, 1, 3)
gates = linattn.Gates(log_decay=step * torch.tensor(0.5).log(), beta=step)
print(attention(x, x, x, gates=gates).flatten().tolist())  # [1.0, 1.5, 2.375]
