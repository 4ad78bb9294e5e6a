import torch

import linattn


class Absolute(linattn.FeatureMap):
    """φ(x) = |x|"""

    def query(self, x):
        return linattn.Features(x.abs())

    def key(self, x):
        return self.query(x)


attention = linattn.LinearAttention(Absolute(), causal=True)
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
print(attention(q, k, v).shape)  # torch.Size([1, 4, 100, 16])
