import torch

import linattn


def pair() -> tuple[linattn.Branch, linattn.Branch]:
    return linattn.Branch(linattn.MultiheadAttention(32, 4, "elu")), linattn.Branch(linattn.FeedForward(32, 128))


# 20 layers keep no more activations for the backward pass than one
stack = linattn.ReversibleSequence(pair() for _ in range(20))
print(stack(torch.randn(2, 50, 32)).shape)  # torch.Size([2, 50, 32])
