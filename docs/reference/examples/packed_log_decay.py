import torch

import linattn

# two documents of 40 and 60 tokens in one row
q, k, v = torch.randn(3, 1, 4, 100, 16)
resets = linattn.packed_log_decay(torch.tensor([0, 40, 100]), 100)
y, _ = linattn.causal_linear_attention(q, k, v, log_decay=resets, feature_map="softplus")
alone, _ = linattn.causal_linear_attention(*(x[:, :, 40:] for x in (q, k, v)), feature_map="softplus")
print(torch.allclose(y[:, :, 40:], alone, atol=1e-5))  # True
