import torch
from torch import nn

import linattn

inner = linattn.named_attention("local+elu", num_heads=4, head_dim=8, causal=True, window=10)
branches = [
    linattn.Branch(linattn.MultiheadAttention(32, 4, inner), norm=nn.LayerNorm(32)),
    linattn.Branch(linattn.GatedFeedForward(32, 64), norm=nn.LayerNorm(32)),
]
model = linattn.SequenceModel(nn.Embedding(100, 32), linattn.ResidualSequence(branches), tied=True)
print(model(torch.randint(100, (2, 50))).shape)  # torch.Size([2, 50, 100])
print(len(linattn.generate(model, [[1, 2]], max_new_tokens=3)[0]))  # 3
