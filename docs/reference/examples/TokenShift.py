import torch

import linattn

# half of the channels come from the token before
x = torch.arange(8.0).reshape(1, 4, 2)
print(linattn.TokenShift((0, 1))(x)[0, :, 1])  # tensor([0., 1., 3., 5.])
