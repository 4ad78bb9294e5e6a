import torch

import linattn

favor = linattn.FavorFeatureMap(16)
q, k, v = torch.randn(3, 1, 4, 100, 16)  # batch, heads, tokens, channels
k = 20 * k  # features of e^200 and more, which no float32 holds
y, state = linattn.causal_feature_attention(favor.query(q), favor.key(k), v)
print(y.shape, y.isfinite().all())  # torch.Size([1, 4, 100, 16]) tensor(True)
more, _ = linattn.causal_feature_attention(favor.query(q), favor.key(-k), v, state)
print(more.isfinite().all())  # tensor(True)
