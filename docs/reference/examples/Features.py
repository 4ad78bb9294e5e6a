import torch

import linattn

x = torch.randn(1, 4, 100, 16)
# exp(x), as exponents that cannot overflow: the operator applies the function, relative to a running maximum
features = linattn.Features(x, function="exp")
print(features.x is x, features.log_scale)  # True None
