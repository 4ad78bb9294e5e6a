import torch
from torch import nn

import linattn


def model(causal: bool, cross: bool) -> linattn.SequenceModel:
    inner = linattn.named_attention("elu", num_heads=4, head_dim=8, causal=causal)
    branches = [linattn.Branch(linattn.MultiheadAttention(32, 4, inner), norm=nn.LayerNorm(32))]
    if cross:
        branches.append(linattn.Branch(linattn.MultiheadAttention(32, 4, "elu", context_dim=32)))
    return linattn.SequenceModel(nn.Embedding(100, 32), linattn.ResidualSequence(branches), tied=cross)


both = linattn.EncoderDecoder(model(causal=False, cross=False), model(causal=True, cross=True))
source, target = torch.randint(100, (2, 30)), torch.randint(100, (2, 10))
print(both(source, target).shape)  # torch.Size([2, 10, 100])
