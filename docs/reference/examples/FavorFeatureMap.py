import torch

import linattn

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, 100, 16) / 2
wanted = linattn.SoftmaxAttention()(q, k, v)
few, many = (linattn.LinearAttention(linattn.FavorFeatureMap(16, num))(q, k, v) for num in (32, 4096))
print((few - wanted).norm() > 4 * (many - wanted).norm())  # tensor(True)
