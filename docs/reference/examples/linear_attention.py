import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
y = linattn.linear_attention(q, k, v, feature_map="relu")
state = linattn.summarize(k, v, feature_map="relu")
print(torch.allclose(linattn.read(q, state, feature_map="relu"), y, atol=1e-5))  # True
