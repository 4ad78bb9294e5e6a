import torch

import linattn

model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
linattn.replace_attention(model, "elu")
print(model(torch.randn(2, 100, 32)).shape)  # torch.Size([2, 100, 32])
