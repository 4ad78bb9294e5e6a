import torch

import linattn

attention = linattn.LinearAttention(linattn.ElementwiseFeatureMap("elu_plus_one"), causal=True)
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
y = attention(q, k, v)
# the same as a recurrent network: 90 tokens at once, then one at a time
first, state = attention.extend(q[:, :, :90], k[:, :, :90], v[:, :, :90])
outputs = [first]
for i in range(90, 100):
    token, state = attention.extend(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1], state)
    outputs.append(token)
print(torch.allclose(torch.cat(outputs, 2), y, atol=1e-5))  # True
