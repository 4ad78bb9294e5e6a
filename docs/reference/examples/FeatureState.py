import torch

import linattn

k, v = torch.randn(2, 1, 4, 100, 16)
sums, log_scale = linattn.summarize_features(linattn.Features(k, function="exp"), v)
# the sums of exp(k), as long as they are in range
print(torch.allclose(sums.z * log_scale.exp(), k.exp().sum(-2), rtol=1e-4))  # True
# a past that counts half
half = linattn.FeatureState(linattn.LinearState(sums.S / 2, sums.z / 2), log_scale)
print(half.log_scale.shape)  # torch.Size([1, 4, 1])
