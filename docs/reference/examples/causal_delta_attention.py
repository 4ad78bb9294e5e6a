import torch

from linattn import causal_delta_attention

# two keys of length 1; the second token overwrites nothing, the third what the first wrote
k = torch.eye(4)[[0, 1, 0]]
v = torch.tensor([[1.0], [2.0], [3.0]])
y, state = causal_delta_attention(k, k, v, torch.ones(3))
print(y.flatten().tolist())  # [1.0, 2.0, 3.0]
print(state.flatten().tolist())  # [3.0, 2.0, 0.0, 0.0]

# go on from the state, with half of it kept at the next token
y, _ = causal_delta_attention(k[:1], k[:1], v[:1], torch.zeros(1), state, log_decay=torch.tensor([0.5]).log())
print(y.item())  # 1.5
