import torch

import linattn

inner = linattn.named_attention("kda", num_heads=4, head_dim=8, causal=True)
make = linattn.token_gates(inner.needs, 32, num_key_heads=4, key_dim=8)
gates = make(torch.randn(2, 10, 32))
print(tuple(gates.log_decay.shape), tuple(gates.beta.shape))  # (2, 4, 10, 8) (2, 4, 10)
q, k, v = torch.randn(3, 2, 4, 10, 8)
print(tuple(inner(q, k, v, gates=gates).shape))  # (2, 4, 10, 8)
