import torch

import linattn

# one head and three tokens; the third has the key of the first, longer, and overwrites its value
attention = linattn.DeltaAttention()
k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0]]).reshape(1, 1, 3, 2)
v = torch.tensor([[1.0], [2.0], [5.0]]).reshape(1, 1, 3, 1)
gates = linattn.Gates(beta=torch.ones(1, 1, 3))
y, state = attention.extend(k, k, v, gates=gates)
print(state.S.flatten().tolist())  # [5.0, 2.0]
# outputs are divided by the root of the two channels
print((y * 2**0.5).flatten().round().tolist())  # [1.0, 2.0, 5.0]
