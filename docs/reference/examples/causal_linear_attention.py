import torch

import linattn

q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
y, state = linattn.causal_linear_attention(q, k, v, feature_map="elu_plus_one")
first, state = linattn.causal_linear_attention(*(x[:, :, :60] for x in (q, k, v)), feature_map="elu_plus_one")
rest, state = linattn.causal_linear_attention(*(x[:, :, 60:] for x in (q, k, v)), state, feature_map="elu_plus_one")
print(torch.allclose(torch.cat([first, rest], 2), y, atol=1e-5))  # True
