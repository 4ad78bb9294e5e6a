import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
y = linattn.SoftmaxAttention(causal=True)(q, k, v)
wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
print(torch.allclose(y, wanted, atol=1e-6))  # True
