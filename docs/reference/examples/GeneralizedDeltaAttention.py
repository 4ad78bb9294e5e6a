import torch

import linattn

# one head of two channels; rates of 1, nothing fades: the third token overwrites what the first one wrote
attention = linattn.GeneralizedDeltaAttention(1, 2)
k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).reshape(1, 1, 3, 2)
v = torch.tensor([[1.0], [2.0], [5.0]]).reshape(1, 1, 3, 1)
y, state = attention.extend(k, k, v, gates=linattn.Gates(torch.zeros_like(k), torch.ones_like(k)))
print(state.S.flatten().tolist())  # [5.0, 2.0]
# with a rate of 0, nothing is removed from the second channel, and nothing written to it
rates = torch.tensor([1.0, 0.0]).expand_as(k)
_, state = attention.extend(k, k, 10 * v, state, gates=linattn.Gates(torch.zeros_like(k), rates))
print(state.S.flatten().tolist())  # [50.0, 2.0]
